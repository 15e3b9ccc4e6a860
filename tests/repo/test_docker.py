"""The images and the compose file are well formed, and say nothing the programs do not know.

No Docker engine runs where the tests run: what can be checked without one is checked here.
"""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import pytest
import yaml
from pydantic_settings import BaseSettings

from commands import installed, run
from scheduler_svc.config import SchedulerSettings
from scripted_server import ScriptedServer, serving
from source_tree import ROOT, relative
from worker_svc.config import WorkerSettings

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE_FILE = ROOT / "docker/compose.yaml"
YAMLLINT = (
    "{extends: default, rules: {line-length: {max: 100}, document-start: disable,"
    " braces: {max-spaces-inside: 0}}}"
)


def _compose() -> dict[str, Any]:
    content = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def _services(prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, service in _compose()["services"].items():
        if name.startswith(prefix):
            yield name, service


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=relative)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    run(installed("hadolint"), dockerfile)


def test_yamllint_finds_nothing() -> None:
    run(sys.executable, "-m", "yamllint", "--strict", "-d", YAMLLINT, COMPOSE_FILE)


def test_the_compose_file_follows_the_compose_specification() -> None:
    schema = json.loads((ROOT / "docker/schema/compose-spec.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(_compose())


def test_no_unknown_key_follows_the_compose_specification() -> None:
    """The schema has teeth: a misspelt key is an error, not an extension."""
    schema = json.loads((ROOT / "docker/schema/compose-spec.json").read_text(encoding="utf-8"))
    compose = _compose()
    compose["services"]["scheduler"]["stop_grace_perod"] = "45s"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(compose)


@pytest.mark.parametrize(
    ("prefix", "settings"), [("scheduler", SchedulerSettings), ("worker", WorkerSettings)]
)
def test_every_flag_and_variable_is_a_setting(prefix: str, settings: type[BaseSettings]) -> None:
    known = set(settings.model_fields)
    services = list(_services(prefix))
    assert services
    for name, service in services:
        flags = [word for word in service["command"] if word.startswith("--")]
        given = {flag[2:].partition("=")[0].replace("-", "_") for flag in flags}
        given |= {
            variable.removeprefix("PAGEMILL_").lower()
            for variable in service.get("environment", {})
            if variable.startswith("PAGEMILL_")
        }
        assert given <= known, f"{name} knows no {given - known}"


def test_the_profile_gpu_gives_each_worker_a_gpu_of_its_own() -> None:
    devices = [
        device
        for _, service in _services("worker-gpu")
        for device in service["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert all(device["capabilities"] == ["gpu"] for device in devices)
    ids = [device_id for device in devices for device_id in device["device_ids"]]
    assert len(ids) == len(set(ids)) == len(list(_services("worker-gpu"))) >= 2


def test_draining_is_never_cut_short() -> None:
    ((_, scheduler),) = _services("scheduler")
    (drain_s,) = (
        float(word.partition("=")[2])
        for word in scheduler["command"]
        if word.startswith("--drain-timeout=")
    )
    assert float(scheduler["stop_grace_period"].removesuffix("s")) > drain_s


def test_only_loopback_addresses_are_published() -> None:
    published = [
        port for service in _compose()["services"].values() for port in service.get("ports", [])
    ]
    assert published
    assert all(re.match(r"127\.0\.0\.1:|\$\{\w+:-127\.0\.0\.1:", port) for port in published)


async def test_the_health_check_says_whether_the_server_can_answer() -> None:
    script = ScriptedServer()
    async with serving(script) as address:
        assert await _health_status(address) == 0
        script.serving = False
        assert await _health_status(address) == 1
    assert await _health_status(address) == 1


async def _health_status(address: str) -> int:
    command = (sys.executable, str(ROOT / "docker/healthcheck.py"), address)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    return await process.wait()


def test_every_file_an_image_copies_exists() -> None:
    for dockerfile in DOCKERFILES:
        for line in dockerfile.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] == ["COPY"] and not words[1].startswith("--from="):
                assert all((ROOT / source).exists() for source in words[1:-1]), line
