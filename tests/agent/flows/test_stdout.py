"""Records on standard output: whole lines, also through a pipe that is full for a while."""

import os
import threading

import msgspec
import pytest

from agent.flows.records import FlowRecord
from agent.flows.stdout import StandardOutput
from tests.agent.flows.test_outlet import flow

RECORDS = 1000


@pytest.mark.parametrize("blocks", [True, False])
def test_slow_reader_gets_every_line(blocks: bool) -> None:
    """A pipe has room for a tenth of these."""
    reader, writer = os.pipe()
    os.set_blocking(writer, blocks)

    def send() -> None:
        StandardOutput(writer).send([flow(number) for number in range(RECORDS)])
        os.close(writer)

    sending = threading.Thread(target=send)
    sending.start()
    with open(reader, "rb") as lines:
        found = [msgspec.json.decode(line, type=FlowRecord).packets for line in lines]
    sending.join()
    assert found == list(range(RECORDS))


def test_reader_that_is_gone_is_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        StandardOutput(writer).send([flow(1)])
    os.close(writer)
