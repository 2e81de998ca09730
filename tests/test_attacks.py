"""The list of tests in docs/internals/attacks.md is made from the tests' names."""

import pytest

from tests.attacks import page as attacks


def test_list_of_tests_is_current() -> None:
    page = attacks.PAGE.read_text(encoding="utf-8")
    assert attacks.render(page) == page, "run 'make docs' and commit the result"


# Files of other subjects that show the rejection of an attack, too.
OTHER_FILES = {
    "test_default_deny.py",
    "test_default_deny_datagrams.py",
    "test_host_devices.py",
    "test_replies.py",
    "test_switch.py",
    "test_untouched_gateway_pairs.py",
}


def test_every_file_of_attacks_is_on_the_page() -> None:
    found = attacks.groups(attacks.PAGE.read_text(encoding="utf-8"))
    assert [group.file for group in found if not group.summary or not group.tests] == []
    bypasses = {path.name for path in attacks.DIRECTORY.glob("test_bypass*.py")}
    assert bypasses | OTHER_FILES <= {group.file for group in found}


def test_page_without_the_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="the page has no table"):
        attacks.render("# Attacks\n")
