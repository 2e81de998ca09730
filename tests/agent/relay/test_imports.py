"""What the relay imports: a smaller process ends sooner, and the kubelet waits for its end."""

import json
import subprocess
import sys

_SCRIPT = """
import json, sys
import agent.relay.main
from agent.relay.answers import TargetAnswers
from agent.relay.messages import Answer, GrpcRequest, HttpRequest

def loaded():
    return sorted({"asyncio", "hpack", "logging"} & sys.modules.keys())

found = [loaded()]
answers = TargetAnswers()
for request in (HttpRequest(b"GET / HTTP/1.1"), GrpcRequest("")):
    answers.set_answers([Answer(1, 80, request, needs_pod=False)])
    found.append(loaded())
print(json.dumps(found))
"""


def test_what_reads_grpc_is_imported_with_the_first_answer_that_needs_it() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, check=True)
    assert json.loads(done.stdout) == [[], [], ["hpack", "logging"]]
