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

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# The engine's names (EngineStats) and vLLM's names for the same facts, with what is said about them.
COUNTERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "prompt_tokens": (("vllm:prompt_tokens", "vllm:prefix_cache_queries"), "Prompt tokens of admitted requests"),
    "generated_tokens": (("vllm:generation_tokens",), "Tokens generated and delivered"),
    "cached_tokens": (("vllm:prefix_cache_hits",), "Prompt tokens whose KV was found in the prefix cache"),
    "retractions": (("vllm:num_preemptions",), "Running choices put back to make room"),
    "drafted": (("vllm:spec_decode_num_draft_tokens",), "Draft tokens verified"),
    "accepted": (("vllm:spec_decode_num_accepted_tokens",), "Draft tokens accepted"),
    "recomputed_tokens": ((), "Tokens of sessions and retracted choices whose KV had gone and was computed again"),
    "host_saved_tokens": ((), "Tokens whose KV was copied to host memory when it left the device"),
    "host_restored_tokens": (("vllm:external_prefix_cache_hits",), "Tokens whose KV was copied back, not computed"),
    "host_declined_tokens": ((), "Tokens that host memory held and that were computed, since that took less time"),
    "host_forgotten_tokens": ((), "Tokens whose copy in host memory made room for others, or was flushed"),
    "drafter_faults": ((), "Times that a third party's drafter failed and a step or a row went without drafts"),
    "elastic_predicted_seconds": ((), "What the cost model said that steps would take"),
    "elastic_measured_seconds": ((), "What those steps took"),
    "elastic_plain_seconds": ((), "What the same tokens would have taken without drafts, by the cost model"),
    "elastic_regret_seconds": ((), "Seconds of steps that drafts made longer than they were worth"),
    "elastic_probes": ((), "Steps that verified drafts only to see whether they have become worth it"),
    "elastic_absent_drafts": ((), "Drafts that rows might have verified, and for which steps had no room made"),
}
GAUGES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "running": (("vllm:num_requests_running",), "Choices in the batch"),
    "waiting": (("vllm:num_requests_waiting",), "Choices waiting for a place in the batch"),
    "host_bytes_used": ((), "Bytes of host memory that hold copies of KV"),
    "host_bytes_total": ((), "Bytes of host memory for copies of KV"),
    "host_save_bytes_per_second": ((), "How fast KV is copied to host memory, measured; 0: not yet"),
    "host_restore_bytes_per_second": ((), "How fast KV is copied back, measured; 0: not yet"),
    "prefill_tokens_per_second": ((), "How fast steps feed prompts, measured for the host tier; 0: not yet"),
    "kv_usage": (("vllm:kv_cache_usage_perc",), "Share of KV pages in use, 0 to 1"),
}
# Engine counters that are one fact with a label: family -> (label, {value: engine's name}, text)
BY_KIND: Mapping[str, tuple[str, Mapping[str, str], str]] = {
    "stretto_step_tokens": ("kind", {"prefill": "prefill_tokens", "decode": "decode_tokens",
                                     "verify": "verify_tokens"}, "Tokens fed to the model, by what their row was for"),
    "stretto_step_rows": ("kind", {"prefill": "prefill_rows", "decode": "plain_rows", "verify": "verify_rows"},
                          "Rows of steps, by what they were for"),
    "vllm:spec_decode_num_drafts": ("", {"": "verify_rows"}, "Drafts verified, each of one or more tokens"),
}
BY_PLACE: Mapping[str, tuple[tuple[str, ...], str, str]] = {  # engine's name before the number: families, label, text
    "drafted_at": (("stretto_drafted_per_position",), "position", "Draft tokens verified, by place in the draft"),
    "accepted_at": (("stretto_accepted_per_position", "vllm:spec_decode_num_accepted_tokens_per_pos"), "position",
                    "Draft tokens accepted, by place in the draft"),
    "elastic_chosen": (("stretto_elastic_rows",), "drafts", "Rows that decode, by the drafts the step gave them"),
}
ACCEPTED_RUNS = ("stretto_accepted_run_tokens", "Draft tokens accepted in a step, of each row with drafts")
TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY = "time_to_first_token_seconds", "inter_token_latency_seconds"
REQUEST_LATENCY, QUEUE_TIME = "e2e_request_latency_seconds", "request_queue_time_seconds"
HISTOGRAMS: Mapping[str, str] = {  # each under our prefix and vLLM's
    TIME_TO_FIRST_TOKEN: "From a request's arrival to its first token",
    INTER_TOKEN_LATENCY: "Between two tokens of a choice; tokens of one step share the step's time",
    REQUEST_LATENCY: "From a request's arrival to its end",
    QUEUE_TIME: "From a request's arrival to its place in the batch",
}


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
