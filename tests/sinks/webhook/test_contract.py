"""The contract suite for the webhook sink in each format."""

import pytest

from bridge.testing.http_contract import Answer, HttpSinkContract

SECRET_PATH = "services/T0000/XXXX-path-4711"
TOKEN = "bearer-0815-token"
SIGNING = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"
ROUTING_KEY = "R0123456789ABCDEFGHIJKLMNOPQRSTU"


class TestWebhookSinkContract(HttpSinkContract):
    sink_type = "webhook"
    secrets = ("XXXX-path-4711", TOKEN, SIGNING)
    skips = {"test_part_of_a_batch_refused_is_rejected_by_name": "a webhook request contains one record"}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path):
        self.files = tmp_path
        self.file("token", TOKEN)
        self.file("secret", SIGNING)

    def file(self, name, text):
        path = self.files / name
        path.write_text(f"{text}\n")
        return str(path)

    def table(self, address):
        return {
            "url_file": self.file("url", f"http://{address.authority}/{SECRET_PATH}"),
            "bearer_token_file": str(self.files / "token"),
            "secret_file": str(self.files / "secret"),
        }


class TestWebhookSinkContractWithAlertmanager(TestWebhookSinkContract):
    accepted = Answer(status=200, body=b'{"versionInfo": {}}')

    def table(self, address):
        return {**super().table(address), "format": "alertmanager"}


class TestWebhookSinkContractWithPagerDuty(TestWebhookSinkContract):
    accepted = Answer(status=202, body=b'{"status": "success"}')
    secrets = (*TestWebhookSinkContract.secrets, ROUTING_KEY)

    def table(self, address):
        return {
            **super().table(address),
            "url_file": self.file("url", f"http://{address.authority}/{SECRET_PATH}/v2/enqueue"),
            "format": "pagerduty",
            "routing_key_file": self.file("key", ROUTING_KEY),
        }


class TestWebhookSinkContractWithTemplate(TestWebhookSinkContract):
    @pytest.fixture(autouse=True)
    def jinja2(self):
        pytest.importorskip("jinja2", reason="the extra [template] is not installed")

    def table(self, address):
        return {**super().table(address), "format": "template", "template": '{"id": {{ record.id | tojson }}}'}
