"""The command line carries no guesser of character sets; whoever uses the package as a library keeps it."""

import subprocess
import sys

GUESSERS = "{'chardet', 'charset_normalizer'} & set(sys.modules)"


def run(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True)


def test_command_line_is_imported_without_it_and_without_a_warning():
    done = run(
        f"import sys, bridge.cli.commands; print({GUESSERS});"
        "import requests; print(requests.Response().apparent_encoding)"
    )
    assert (done.stdout, done.stderr) == ("set()\nutf-8\n", "")


def test_whoever_wants_it_later_gets_it():
    done = run(
        "import bridge.cli.commands, charset_normalizer; print(charset_normalizer.from_bytes(b'a').best().encoding)"
    )
    assert (done.stdout, done.stderr) == ("ascii\n", "")


def test_library_leaves_requests_as_it_is_installed():
    done = run(f"import sys, bridge.sink, requests; print(bool({GUESSERS}))")
    assert (done.stdout, done.stderr) == ("True\n", "")
