"""docs/operations.md lists every setting and metric as the code has them.

A table that differs is printed as it should be, to paste it.
"""

import re
from collections.abc import Iterable, Iterator

import pytest
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from pagemill.cli.program_settings import SCHEDULER_SETTINGS, WORKER_SETTINGS
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core.errors import RequestError
from scheduler_svc.core.residency import Residency
from scheduler_svc.service import trace_names
from scheduler_svc.service.metrics import (
    LoadCollector,
    RequestMetrics,
    ResidencyMetrics,
    StepMetrics,
    new_registry,
)
from scheduler_svc.service.server_state import Load, Totals
from scheduler_svc.service.status import REFUSALS
from source_tree import ROOT
from worker_svc.config import WorkerSettings

OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def _table(name: str) -> str:
    """Return the lines between a table's two marks."""
    (found,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end -->", OPERATIONS, re.DOTALL)
    return str(found)


def _settings_table(settings: type[BaseSettings]) -> Iterator[str]:
    yield "| flag | default | meaning |"
    yield "| --- | --- | --- |"
    for name, field in settings.model_fields.items():
        if name != "model_path":
            meaning = " ".join((field.description or "").split())
            yield f"| `{_flag(name, field)}` | {_default(field)} | {meaning} |"


def _flag(name: str, field: FieldInfo) -> str:
    prefix = "--no-" if field.default is True else "--"
    return prefix + name.replace("_", "-")


def _default(field: FieldInfo) -> str:
    match field.default:
        case None | "" | [] | SecretStr():
            return "unset"
        case bool(on):
            return "on" if on else "off"
        case float(number):
            return f"{number:g}"
        case other:
            return str(other)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("settings: scheduler", SchedulerSettings), ("settings: worker", WorkerSettings)],
)
def test_every_setting_is_documented(name: str, settings: type[BaseSettings]) -> None:
    assert _table(name) == "".join(f"{line}\n" for line in _settings_table(settings))


def _no_load() -> Load:
    totals = Totals(
        steps=0,
        prompt_tokens=0,
        generation_tokens=0,
        prefix_queries=0,
        prefix_hits=0,
        preemptions=0,
        recomputed_tokens=0,
    )
    return Load(
        running=0,
        waiting=0,
        used_blocks=0,
        idle_cached_blocks=0,
        free_blocks=0,
        total_blocks=0,
        waiting_tokens=0,
        totals=totals,
        recent=None,
    )


def _metrics_table() -> Iterator[str]:
    registry = new_registry()
    StepMetrics(registry)
    RequestMetrics(registry)
    ResidencyMetrics(registry, Residency(1, lambda: 0.0))
    registry.register(LoadCollector(_no_load))
    yield "| metric | kind | meaning |"
    yield "| --- | --- | --- |"
    for family in sorted(registry.collect(), key=lambda family: family.name):
        if family.name.startswith("pagemill_"):
            suffix = "_total" if family.type == "counter" else ""
            yield f"| `{family.name}{suffix}` | {family.type} | {family.documentation} |"


def test_every_metric_is_documented() -> None:
    assert _table("metrics") == "".join(f"{line}\n" for line in _metrics_table())


def _refusals_table() -> Iterator[str]:
    yield "| status | reason | when |"
    yield "| --- | --- | --- |"
    for kind, row in REFUSALS.items():
        if kind is not RequestError:
            yield f"| {row.code.name} | `{row.reason}` | {(kind.__doc__ or '').splitlines()[0]} |"


def test_every_refusal_is_documented() -> None:
    assert _table("refusals") == "".join(f"{line}\n" for line in _refusals_table())


def test_every_span_is_documented() -> None:
    spans = {value for name, value in vars(trace_names).items() if name.endswith("_SPAN")}
    assert {span for span in spans if f"`{span}`" not in OPERATIONS} == set()


@pytest.mark.parametrize(
    ("passed_on", "settings", "own"),
    [
        (SCHEDULER_SETTINGS, SchedulerSettings, {"model_path", "config"}),
        # The pool's size is the scheduler's to say, and `serve` knows where its worker joins.
        (
            WORKER_SETTINGS,
            WorkerSettings,
            {"model_path", "config", "join", "join_timeout", "num_gpu_blocks_override"}
            | {"bench_forward", "rank_host"},
        ),
    ],
)
def test_pagemill_serve_passes_on_what_the_programs_know(
    passed_on: Iterable[str], settings: type[BaseSettings], own: set[str]
) -> None:
    """The command imports neither program, so its lists are compared here."""
    assert set(passed_on) == set(settings.model_fields) - own
