"""The contract suite for the otlp sink."""

from typing import ClassVar

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

from bridge.testing.http_contract import Answer, HttpSinkContract

SECRET = "otlp-token-4711"
HEADER_SECRET = "tenant-key-0815"


class TestOtlpSinkContract(HttpSinkContract):
    sink_type = "otlp"
    secrets = (SECRET, HEADER_SECRET)
    batch_size = 3

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        self.token = tmp_path / "token"
        self.token.write_text(SECRET)
        self.headers = tmp_path / "headers"
        self.headers.write_text(f"x-tenant-key: {HEADER_SECRET}\n")

    def table(self, address):
        return {
            "endpoint": f"http://{address.authority}",
            "bearer_token_file": str(self.token),
            "headers_file": str(self.headers),
        }

    def partial(self, refused_ids):
        response = ExportLogsServiceResponse()
        response.partial_success.rejected_log_records = len(refused_ids)
        response.partial_success.error_message = f"too old, said {SECRET}"
        return Answer(status=200, body=response.SerializeToString(), content_type="application/x-protobuf")


class TestOtlpSinkContractWithGzip(TestOtlpSinkContract):
    skips: ClassVar = {"test_silence_leaves_no_thread_and_no_socket_behind": "the connection is the same without gzip"}

    def table(self, address):
        return {**super().table(address), "compression": "gzip"}
