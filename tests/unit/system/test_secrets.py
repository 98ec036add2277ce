"""Secrets in files must be regular, small files, so that reading never hangs."""

import os
import threading

import pytest

from bridge.errors import SecretUnavailable
from bridge.system.secrets import Secret


def test_file_is_read_again_when_it_changes(tmp_path):
    file = tmp_path / "token"
    file.write_text("# old\nfirst\n\nsecond\n")
    secret = Secret(key="bearer_token", file=str(file))
    assert secret.values() == ("first", "second")
    file.write_text("third, which is longer\n")
    assert secret.value() == "third, which is longer"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in the file system here")
def test_named_pipe_and_device_are_rejected_immediately(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    said = []

    def read():
        for file in (tmp_path / "pipe", "/dev/zero"):
            with pytest.raises(SecretUnavailable, match="it is not a regular file") as caught:
                Secret(key="bearer_token", file=str(file)).value()
            said.append(caught.value.needs_attention)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(10)
    assert said == [True, True]


def test_oversized_file_is_rejected_and_not_truncated(tmp_path):
    file = tmp_path / "token"
    with file.open("wb") as writing:
        writing.write(b"token\n")
        writing.truncate(2**33)
    with pytest.raises(SecretUnavailable, match="longer than 64 KiB"):
        Secret(key="bearer_token", file=str(file)).value()
