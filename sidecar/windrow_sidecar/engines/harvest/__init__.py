"""Harvesting inside a decode engine: the step hook, lending, and the link to the agent."""

from __future__ import annotations

from windrow_sidecar.engines.harvest.hook import HarvestHook
from windrow_sidecar.engines.harvest.link import EngineAgentLink
from windrow_sidecar.engines.harvest.settings import HarvestSettings

__all__ = ["EngineAgentLink", "HarvestHook", "HarvestSettings"]
