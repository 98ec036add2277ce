"""What is printed for a person: how to call the command again."""

from bridge.cli.terminal import this_command


def test_command_of_a_venv_is_shown_with_its_path_and_one_on_the_path_by_its_name(tmp_path, monkeypatch):
    ours, other = tmp_path / "venv" / "scheduled-events-bridge", tmp_path / "bin" / "scheduled-events-bridge"
    for program in (ours, other):
        program.parent.mkdir()
        program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    called = "venv/scheduled-events-bridge"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert this_command(called, ["python", called, "demo"]) == called
    assert this_command("scheduled-events-bridge", ["python"]) == "scheduled-events-bridge"
    monkeypatch.setenv("PATH", str(other.parent))
    assert this_command(called, ["python", called, "demo"]) == called
    monkeypatch.setenv("PATH", str(ours.parent))
    assert this_command(str(ours), ["python", str(ours), "demo"]) == "scheduled-events-bridge"
    assert this_command("/a b/scheduled-events-bridge", ["python"]) == "'/a b/scheduled-events-bridge'"
    assert this_command("/lib/bridge/__main__.py", ["python3.12", "-m", "bridge"]) == "python3.12 -m bridge"
