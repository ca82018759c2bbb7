"""The services of `services.py`, each started once for all tests that ask for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("kvtide.offload.conformance")

import services  # noqa: E402
from services import BUCKET, skipping  # noqa: E402


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[services.Redis]:
    pytest.importorskip("redis")
    with skipping(), services.redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[services.S3]:
    """A service with the bucket `BUCKET`."""
    pytest.importorskip("boto3")
    with pytest.MonkeyPatch.context() as patch, skipping():
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        with services.s3_server(tmp_path_factory.mktemp("s3")) as server:
            server.client().create_bucket(Bucket=BUCKET)
            yield server


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[services.Mooncake]:
    with skipping(), services.mooncake_master(tmp_path_factory.mktemp("mooncake")) as server:
        yield server
