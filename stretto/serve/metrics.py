"""/metrics: what the engine counts and what the server sees, as Prometheus text.

Names of our own begin with `stretto_`; the same facts also carry vLLM's names, which gateways, autoscalers and
dashboards look for. A custom collector reads the last snapshot of the engine, so that nothing is counted twice and
counters can only grow.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from stretto.protocol import EngineInfo, EngineStats
from stretto.serve.metric_names import (
    ACCEPTED_RUNS,
    BY_KIND,
    BY_PLACE,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    KV_PAGES,
    PAGE_STATES,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Cumulative counts over fixed bounds; cheap enough for one observation per token."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        total, out = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out


class ServerMetrics(Collector):
    """Counts what the server sees; joins it with the engine's snapshot when it is scraped."""

    def __init__(self, info: EngineInfo, model_name: str, engine: int = 0):
        self.info, self._labels = info, {"model_name": model_name, "engine": str(engine)}
        self._snapshot = EngineStats()
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        self.finished: Counter[str] = Counter()  # by finish reason
        self.aborts: Counter[str] = Counter()  # by cause
        self.adapters: Callable[[], tuple[set[str], set[str]]] = lambda: (set(), set())  # that run; of calls that wait
        self.responses: Counter[tuple[str, int]] = Counter()  # (route, status)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # process_cpu_seconds_total, open files, memory: of this process

    @property
    def snapshot(self) -> EngineStats:
        """The engine's numbers as they were last taken."""
        return self._snapshot

    def take(self, snapshot: EngineStats) -> None:
        """The engine's newest snapshot. Its counters replace the old ones where they have grown."""
        old = self._snapshot.counters
        grown = {name: max(value, old.get(name, value)) for name, value in snapshot.counters.items()}
        self._snapshot = EngineStats(counters=old | grown, gauges=snapshot.gauges | _kv_usage(snapshot.gauges))
        for name, values in snapshot.histograms.items():
            histogram = self.histograms.setdefault(name, Histogram())
            for value in values:
                histogram.observe(value)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    # ------------------------------------------------------------------------------------------------ collector
    def collect(self) -> Iterator[Metric]:
        yield from self._by_label()
        for name, value in self._snapshot.counters.items():
            if "." in name:
                continue  # of a place in the draft, or a length
            others, text = COUNTERS.get(name, ((), f"Engine counter {name}"))
            yield from self._each(CounterMetricFamily, (f"stretto_{name}", *others), text, value)
        for name, value in self._snapshot.gauges.items():
            if name.startswith("pages_"):
                continue  # of a group of layers
            others, text = GAUGES.get(name, ((), f"Engine gauge {name}"))
            yield from self._each(GaugeMetricFamily, (f"stretto_{name}", *others), text, value)
        for name, histogram in self.histograms.items():
            for prefix in ("stretto_", "vllm:") if name in HISTOGRAMS else ("stretto_",):
                family = HistogramMetricFamily(prefix + name, HISTOGRAMS.get(name, f"Engine histogram {name}"),
                                               labels=list(self._labels))
                family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
                yield family
        yield from self._labelled()
        yield from self._config()
        if self.info.max_loras:
            yield self._adapters()

    def _adapters(self) -> Metric:
        """vLLM's: the newest reading is the one with the largest value."""
        running, waiting = self.adapters()
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters that run and wait", labels=[
            *self._labels, "max_lora", "running_lora_adapters", "waiting_lora_adapters"])
        named = [",".join(sorted(names)) for names in (running, waiting)]
        family.add_metric([*self._labels.values(), str(self.info.max_loras), *named], time.time())
        return family

    def _by_label(self) -> Iterator[Metric]:
        counters, labels = self._snapshot.counters, list(self._labels.values())
        for family_name, (label, names, text) in BY_KIND.items():
            family = CounterMetricFamily(family_name, text, labels=[*self._labels, *filter(None, [label])])
            for kind, name in names.items():
                family.add_metric([*labels, *filter(None, [kind])], counters.get(name, 0.0))
            yield family
        for start, (family_names, label, text) in BY_PLACE.items():
            places = {name.partition(".")[2]: value for name, value in counters.items() if name.startswith(f"{start}.")}
            for family_name in family_names:
                family = CounterMetricFamily(family_name, text, labels=[*self._labels, label])
                for place, value in places.items():
                    family.add_metric([*labels, place], value)
                yield family
        yield self._accepted_runs()
        yield self._kv_pages()

    def _kv_pages(self) -> Metric:
        family = GaugeMetricFamily(*KV_PAGES, labels=[*self._labels, "group", "state"])
        for state, start in PAGE_STATES.items():
            for name, value in self._snapshot.gauges.items():
                if name.startswith(start):
                    family.add_metric([*self._labels.values(), name.removeprefix(start), state], value)
        return family

    def _accepted_runs(self) -> Metric:
        family = HistogramMetricFamily(*ACCEPTED_RUNS, labels=list(self._labels))
        found = {int(name.partition(".")[2]): value for name, value in self._snapshot.counters.items()
                 if name.startswith("accepted_runs.")}
        below = [(str(n), sum(found.get(i, 0.0) for i in range(n + 1))) for n in range(max(found, default=-1) + 1)]
        family.add_metric(list(self._labels.values()), [*below, ("+Inf", sum(found.values()))],
                          sum(n * count for n, count in found.items()))
        return family

    def _each(self, kind: type, names: tuple[str, ...], text: str, value: float) -> Iterator[Metric]:
        for name in names:
            family = kind(name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family

    def _labelled(self) -> Iterator[Metric]:
        for full in ("stretto_request_success", "vllm:request_success"):
            family = CounterMetricFamily(full, "Choices that ended, by reason",
                                         labels=[*self._labels, "finished_reason"])
            for reason in sorted({"stop", "length", "abort", "error"} | set(self.finished)):
                family.add_metric([*self._labels.values(), reason], self.finished[reason])
            yield family
        family = CounterMetricFamily("stretto_request_aborts", "Requests withdrawn, by cause",
                                     labels=[*self._labels, "cause"])
        for cause in ("client_disconnected", "abort_request", "request_timeout"):
            family.add_metric([*self._labels.values(), cause], self.aborts[cause])
        yield family
        family = CounterMetricFamily("stretto_http_responses", "HTTP answers, by route and status",
                                     labels=[*self._labels, "route", "status"])
        for (route, status), count in sorted(self.responses.items()):
            family.add_metric([*self._labels.values(), route, str(status)], count)
        yield family

    def _config(self) -> Iterator[Metric]:
        info, gauges = self.info, self._snapshot.gauges
        cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache", labels=[*self._labels, "block_size",
                                                                                    "num_gpu_blocks"])
        pages = int(gauges.get("pages_total_0", info.kv_tokens)) or 1
        cache.add_metric([*self._labels.values(), str(info.kv_tokens // pages), str(pages)], 1)
        yield cache
        own = InfoMetricFamily("stretto_config", "The engine", labels=list(self._labels))
        own.add_metric(list(self._labels.values()), {
            "max_model_len": str(info.max_model_len), "max_num_seqs": str(info.max_num_seqs),
            "kv_tokens": str(info.kv_tokens), "speculation_tokens": str(info.speculation_tokens)})
        yield own
        features = GaugeMetricFamily("stretto_feature_info", "What runs of every feature, as asked and as it is now",
                                     labels=[*self._labels, "feature", "asked", "now", "why"])
        for one in info.server_info.get("features", ()):
            told = (str(one.get(part, "")) for part in ("feature", "asked", "now", "why"))
            features.add_metric([*self._labels.values(), *told], 1)
        yield features


def _kv_usage(gauges: Mapping[str, float]) -> dict[str, float]:
    """Of the fullest KV group."""
    shares = [used / gauges[total] for name, used in gauges.items() if name.startswith("pages_used_")
              and gauges.get(total := name.replace("used", "total"), 0) > 0]
    return {"kv_usage": max(shares)} if shares else {}
