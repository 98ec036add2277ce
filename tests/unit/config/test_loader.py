"""The configuration file: all errors in one report, no secret in messages, and the default paths."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bridge.config.loader import CONFIG_VARIABLE, Settings, documented, find_config, load, load_top, state_directory
from bridge.config.settings import SinkSettings
from bridge.errors import ConfigurationError
from bridge.sink import SinkConfig

SINK = '''
from typing import Literal

from bridge.sink import Sink, SinkConfig

class Config(SinkConfig, frozen=True, kw_only=True):
    url: str
    """Where to."""
    format: Literal["plain", "cloudevents"] = "plain"
    secret_file: str | None = None
    secret_env: str | None = None
    headers: dict[str, str] = {}
    max_batch: int = 100

    def __post_init__(self):
        if self.secret_file and self.secret_env:
            raise ValueError("secret_file and secret_env exclude one another. Write one of them.")

class Hook(Sink):
    Config = Config

    def send(self, batch):
        pass
'''


@pytest.fixture(autouse=True)
def acme(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("acme")
    (folder / "acme_config_test.py").write_text(SINK)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("acme_config_test", None)


HOOK = '[[sinks]]\ntype = "acme_config_test:Hook"\nname = "hook"\nurl = "https://example.net/"\n'


@pytest.fixture
def settings_of(tmp_path):
    def settings_of(text):
        path = tmp_path / "config.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(path)

    return settings_of


@pytest.fixture
def mistakes_of(settings_of):
    def mistakes_of(text):
        with pytest.raises(ConfigurationError) as caught:
            settings_of(text)
        assert str(caught.value) == "\n".join(caught.value.mistakes)
        return caught.value.mistakes

    return mistakes_of


def test_without_a_file_a_stdout_sink_and_documented_defaults_apply():
    settings = load(None)
    assert [(sink.name, sink.type_name) for sink in settings.sinks] == [("stdout", "stdout")]
    assert settings.stop_grace_seconds == 10
    assert settings.imds.endpoint == "http://169.254.169.254"
    assert settings.imds.api_version == "auto"
    assert settings.imds.poll_interval_seconds == 1
    assert (settings.imds.timeout_seconds, settings.imds.first_timeout_seconds) == (5, 150)
    assert (settings.state.max_bytes, settings.state.max_pending_bytes) == (268435456, 33554432)
    assert settings.state.keep_delivered_seconds == 604800
    assert settings.status.address == ("127.0.0.1", 9464)
    assert settings.heartbeat.interval_seconds == 0


def test_every_table_is_read(settings_of):
    settings = settings_of(
        "stop_grace_seconds = 3\n[imds]\npoll_interval_seconds = 2\n"
        '[vm]\nname = "WestNO_0"\ntags = { env = "prod" }\n[labels]\n"my team" = "payments"\n'
        '[state]\ndirectory = "/var/tmp/x"\nmax_bytes = 1048576\nmax_pending_bytes = 65536\n[status]\nlisten = ""\n'
        "[heartbeat]\ninterval_seconds = 60\n" + HOOK + 'headers = { X-Team = "a" }\nevent_types = ["Freeze", "New"]\n'
    )
    assert (settings.stop_grace_seconds, settings.imds.poll_interval_seconds) == (3.0, 2.0)
    assert (settings.vm.name, settings.vm.tags) == ("WestNO_0", {"env": "prod"})
    assert settings.labels == {"my team": "payments"}
    assert (settings.state.max_bytes, settings.state.max_pending_bytes) == (1048576, 65536)
    assert settings.status.address is None
    config = settings.sinks[0].config
    assert (config.name, config.max_batch, config.event_types) == ("hook", 100, ("Freeze", "New"))
    assert settings.sinks[0].build().config is config


def test_all_errors_of_a_file_are_reported_together(mistakes_of):
    said = mistakes_of(
        'stop_grace_secnds = 5\n[imds]\ntimeout_seconds = "5"\n[state]\nmax_bytes = 1\n[approval]\ndry_run = 1\n'
        '[[sinks]]\ntype = "stdot"\n[[sinks]]\ntype = "acme_config_test:Hook"\nmax_batch = 0\n'
    )
    assert sorted(sentence.removeprefix("Unknown key ").split()[0].strip("`.") for sentence in said) == [
        "approval.dry_run",
        "imds.timeout_seconds",
        "sinks[0].type",
        "sinks[1].max_batch",
        "sinks[1].url",
        "state.max_bytes",
        "stop_grace_secnds",
    ]


def test_invalid_key_does_not_hide_an_error_of_several_keys(mistakes_of):
    rule = '[[approval.rules]]\nname = "a"\naction = "{}"\n'
    sink = HOOK + 'timeout_seconds = "5s"\nsecret_file = "a"\nsecret_env = "B"\n'
    said = "\n".join(mistakes_of(sink + rule.format("aprove") + rule.format("approve")))
    assert "timeout_seconds" in said
    assert "secret_file and secret_env exclude one another" in said
    assert "approval.rules[0].action" in said
    assert "The name 'a' occurs 2 times." in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[imds]\ntimeout_seconds = 0", "imds.timeout_seconds is 0, but must be a number above 0"),
        ("[imds]\ntimeout_seconds = inf", "imds.timeout_seconds is inf, but must be a finite number."),
        ("[imds]\ntimeout_seconds = 1e300", "at most 315360000"),
        ("[imds]\npoll_interval_seconds = 0.1", "imds.poll_interval_seconds is 0.1, but must be a number at least 0.2"),
        ("[imds]\napi_version = 2020-07-01", "imds.api_version is 2020-07-01, but must be text in quotes."),
        ('[imds]\napi_version = "2020-7-1"', "imds.api_version is '2020-7-1', but must be one of auto, 2017-03-01"),
        ('[imds]\napi_version = "2020-13-01"', "or a later date as YYYY-MM-DD"),
        ('[imds]\nendpoint = "169.254.169.254"', "imds.endpoint is '169.254.169.254', but must be"),
        ('[imds]\nendpoint = "http://h:99999"', "imds.endpoint is 'http://h:99999', but must be"),
        ('[imds]\nendpoint = "http://h/metadata/x"', "The agent adds the path itself."),
        ("[state]\nmax_bytes = 1048575", "state.max_bytes is 1048575, but must be a whole number at least 1048576"),
        ('[status]\nlisten = ":9464"', 'write "0.0.0.0:9464"'),
        ('[status]\nlisten = "h:65536"', 'must be "host:port"'),
        ('[status]\nlisten = "vm.example.net:9464"', "The host is an address or localhost"),
        ("[heartbeat]\ninterval_seconds = 0.5", "must be 0 for none, or at least 1"),
        ('[labels]\n"my team" = []', "labels.'my team' is an empty list, but must be text in quotes."),
        ('[vm]\nname = ""', "vm: name is empty. Write a value, or remove the key."),
        ("[[imds]]\n", "Write it with one pair of brackets: [imds]"),
        ("dry_run = true", "Unknown key `dry_run`. Valid keys: stop_grace_seconds, imds, vm, labels, state,"),
        ('[sinks]\ntype = "stdout"', "Write each with two pairs of brackets: [[sinks]]"),
        ('sinks = ["stdout"]', "sinks[0] is 'stdout', but must be a table."),
        ('[[sink]]\ntype = "stdout"', "Unknown key `sink`. Did you mean 'sinks'?"),
        ("[[sinks]]\nname = 'x'", "sinks[0].type (sink 'x'): The type is missing or not text. It must be one of "),
        ('[[sinks]]\ntype = "stdot"', "sinks[0].type (sink 'stdot'): No sink type is called 'stdot'."),
        ("[imds]\npoll_interval = 1", "Did you mean 'poll_interval_seconds'?"),
        (HOOK + "stop_grace_seconds = 3", "Unknown key `sinks[0].stop_grace_seconds` (sink 'hook'). Valid keys: "),
    ],
)
def test_error_reports_key_value_and_valid_values(mistakes_of, text, sentence):
    (said,) = mistakes_of(text)
    assert sentence in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("timeout_seconds = 0", "sinks[0].timeout_seconds (sink 'hook') is 0, but must be a number above 0"),
        ("max_batch = 0", "sinks[0].max_batch (sink 'hook') is 0, but must be a whole number at least 1"),
        ('heartbeat = "yes"', "sinks[0].heartbeat (sink 'hook') is 'yes', but must be true or false."),
        ('format = "cloudevent"', "is 'cloudevent', but must be 'cloudevents' or 'plain'. Did you mean 'cloudevents'?"),
        ('transitions = ["cancelled"]', "sinks[0].transitions[0] (sink 'hook') is 'cancelled', but must be one of"),
        ('transitions = ["cancelled"]', "Did you mean 'canceled'?"),
        ("transitions = []", "must be a list that is not empty"),
        (
            'event_types = ["Reboot", "freeze"]',
            "sinks[0].event_types[1] (sink 'hook') is 'freeze', but must be 'Freeze'",
        ),
        ("headers = { X-Team = 5 }", "sinks[0].headers.X-Team (sink 'hook') is 5, but must be text in quotes."),
        (
            'secret = "x"',
            "Did you mean secret_file or secret_env? The configuration must not contain the secret itself.",
        ),
        (
            'secret_file = "a"\nsecret_env = "B"',
            "sinks[0] (sink 'hook'): secret_file and secret_env exclude one another.",
        ),
    ],
)
def test_error_in_a_sink_names_the_sink(mistakes_of, line, sentence):
    (said,) = mistakes_of(HOOK + line + "\n")
    assert sentence in said


@pytest.mark.parametrize("name", ["", "x" * 65, "a/b"])
def test_sink_name_with_special_characters_is_rejected(mistakes_of, name):
    (said,) = mistakes_of(f'[[sinks]]\ntype = "stdout"\nname = "{name}"\n')
    assert "sinks[0].name" in said
    assert "1 to 64 characters" in said


def test_duplicate_sink_name_is_reported_for_both_sinks(mistakes_of):
    (said,) = mistakes_of('[[sinks]]\ntype = "stdout"\n' * 2)
    assert said.startswith("sinks[1] (sink 'stdout'): sinks[0] has the same name.")


@pytest.mark.parametrize(
    "line",
    [
        'secret = "hunter2"',
        'pasword = "hunter2"',
        'command = "run --token hunter2"',
        'command = "run hunter2"',
        'url = 5\nextra = "run --token hunter2"',
        'url = 5\nname = "Bearer hunter2"',
        'url = 5\nname = "eyJhunter2"',
        'url = 5\ntimeout_seconds = "eyJhunter2"',
        'url = "x"\nurls = "https://u:hunter2@example.net/a?sig=hunter2#hunter2"',
        'url = "x"\nurls = "https://hooks.example.net/services/hunter2"',
        'url = "x"\nurls = "slack://hunter2/b"',
        'extra = "Endpoint=sb://ns/;SharedAccessKey=hunter2"',
        'extra = ["hunter2"]',
        "extra = { a = 'hunter2' }",
        "headers = { Authorization = 5, x = ['hunter2'] }",
        "secret_file = ['hunter2']",
        "[sinks.token]\nx = 'hunter2'",
    ],
)
def test_misplaced_secret_is_never_shown(mistakes_of, line):
    said = "\n".join(mistakes_of('[[sinks]]\ntype = "acme_config_test:Hook"\n' + line))
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "keys",
    [
        'type = "http://h/hunter2"',
        'type = "http://h/hunter2"\nname = "hook"',
        'type = "stdout"\nname = "http://h/hunter2"',
    ],
)
def test_url_as_the_name_or_the_type_of_a_sink_is_shown_with_its_host(mistakes_of, keys):
    said = "\n".join(mistakes_of(f"[[sinks]]\n{keys}\n"))
    assert "hunter2" not in said
    assert "http://h/..." in said


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('a = "x', "at end of document"),
        ("[imds]\ntimeout_seconds = = 5\n", "line 2, column 19"),
    ],
)
def test_syntax_error_names_line_and_column(mistakes_of, text, where):
    (said,) = mistakes_of(text)
    assert "is not valid TOML: " in said
    assert where in said
    assert "config.toml" in said


def test_file_that_is_not_text_is_reported(mistakes_of, settings_of):
    assert "Save it as UTF-8." in mistakes_of("[imds]\n".encode("utf-16"))[0]
    assert "is not valid TOML" in mistakes_of("x = " + "[" * 50_000)[0]
    if sys.version_info >= (3, 11):
        assert "is not valid TOML" in mistakes_of("x = " + "9" * 5_000)[0]
    assert settings_of(b"\xef\xbb\xbfstop_grace_seconds = 1").stop_grace_seconds == 1


def test_agent_settings_are_read_without_importing_requests_or_the_sinks(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[state]\ndirectory = "/x"\n' + HOOK + "no_such_key = 1\n")
    code = (
        f"import sys; from pathlib import Path; from bridge.config.loader import load_top; "
        f"print(load_top(Path({str(path)!r})).state.directory, {{'requests', 'prometheus_client'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout == "/x set()\n"
    with pytest.raises(ConfigurationError) as caught:
        load_top(path, {"SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN": "everywhere"})
    assert len(caught.value.mistakes) == 1


def test_explicit_path_wins_over_the_environment(tmp_path):
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.touch()
    two.touch()
    assert find_config(one, {CONFIG_VARIABLE: str(two)}) == one
    assert find_config(None, {CONFIG_VARIABLE: str(two)}) == two


def test_windows_default_path_is_below_program_data(tmp_path):
    environ = {"PROGRAMDATA": str(tmp_path), CONFIG_VARIABLE: ""}
    assert find_config(None, environ, windows=True) is None
    ours = tmp_path / "scheduled-events-bridge"
    ours.mkdir()
    (ours / "config.toml").touch()
    assert find_config(None, environ, windows=True) == ours / "config.toml"
    assert state_directory(load(None), environ, windows=True) == ours / "state"


@pytest.mark.parametrize(
    ("environ", "is_root", "directory"),
    [
        ({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}, True, "/var/lib/a"),
        ({"STATE_DIRECTORY": ""}, True, "/var/lib/scheduled-events-bridge"),
        ({"HOME": "/home/u"}, False, "/home/u/.local/state/scheduled-events-bridge"),
        ({"HOME": "/home/u", "XDG_STATE_HOME": "/s"}, False, "/s/scheduled-events-bridge"),
        ({"HOME": "/home/u", "XDG_STATE_HOME": "s"}, False, "/home/u/.local/state/scheduled-events-bridge"),
    ],
)
def test_state_directory_is_found(environ, is_root, directory):
    assert state_directory(load(None), environ, windows=False, is_root=is_root) == Path(directory)


def test_every_setting_is_documented():
    structs = [Settings, SinkConfig]
    for struct in structs:
        texts = documented(struct)
        for field in msgspec.structs.fields(struct):
            assert texts.get(field.name), f"{struct.__name__}.{field.name} has no text under it"
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                structs.append(field.type)
    assert SinkSettings not in structs
    assert "seconds" in documented(Settings)["stop_grace_seconds"].lower()
