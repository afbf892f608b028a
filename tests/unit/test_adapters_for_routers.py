"""Inference routers read which adapters an instance has, as the Gateway API's protocol has it."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from windrow.proto import agent_pb2
from windrow.rundir import RunDir
from windrow_sidecar.agent.exporter import Exporter
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.slot import AgentSlot
from windrow_sidecar.engines.sglang.adapters import SchedulerAdapters


def scheduler(**changes):
    """Stand where SGLang's scheduler stands, by the names that its own metrics read."""
    refs = {"u1": "team.tone", "u2": "team.terse", "u3": "team.idle"}
    manager = SimpleNamespace(
        lora_refs={uid: SimpleNamespace(lora_name=name) for uid, name in refs.items()},
        # None: the base model's own place; u9 has just been unloaded.
        memory_pool=SimpleNamespace(
            max_loras_per_batch=4, uid_to_buffer_id={None: 0, "u2": 1, "u9": 2, "u1": 3}
        ),
    )
    waiting = [SimpleNamespace(lora_id=uid) for uid in ("u3", None, "u3")]
    runner = SimpleNamespace(lora_manager=manager)
    found = {"tp_worker": SimpleNamespace(model_runner=runner), "waiting_queue": waiting}
    return SimpleNamespace(**found | changes)


def test_adapters_are_named_as_requests_name_them():
    served = SchedulerAdapters(scheduler(), "chat").read()
    assert served.most_on_device == 4
    assert list(served.on_device) == ["chat:team.terse", "chat:team.tone"]
    assert list(served.waited_for) == ["chat:team.idle"]


def test_where_sglang_has_changed_nothing_is_reported():
    adapters = SchedulerAdapters(scheduler(tp_worker=SimpleNamespace()), "chat")
    assert adapters.read() is None
    assert adapters.read() is None


def families(tmp_path, stats):
    settings = AgentSettings(RunDir(tmp_path), pod_namespace="d", pod_name="decode-0")
    slot = AgentSlot(0, settings, EventOutbox(), on_facts=lambda: None)
    slot.stats, slot.reported_at_s = stats, 1700000000.0
    registry = CollectorRegistry()
    registry.register(Exporter(settings, lambda: [slot], lambda: True))
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_metric_has_the_labels_and_the_time_that_routers_look_for(tmp_path):
    served = SchedulerAdapters(scheduler(), "chat").read()
    found = families(tmp_path, agent_pb2.EngineStats(adapters=served))
    (sample,) = found["windrow_lora_requests_info"].samples
    assert sample.value == 1700000000.0
    assert {key: sample.labels[key] for key in sample.labels if "lora" in key} == {
        "max_lora": "4",
        "running_lora_adapters": "chat:team.terse,chat:team.tone",
        "waiting_lora_adapters": "chat:team.idle",
    }
    assert families(tmp_path, agent_pb2.EngineStats())["windrow_lora_requests_info"].samples == []
