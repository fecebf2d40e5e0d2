"""Measures: this library's front ends beside their peers, interleaved in one run.

    workload     what is trained: a model, its batches, the classes of its units
    contenders   who trains it, and how each shards it
    measuring    the rounds, and what is counted in one further step
    meter        bytes on the wire and bytes held, seen from below every contender alike
    results      medians, quartiles, ratios; JSON
    picture      bars with their spread
"""

from __future__ import annotations

__all__: list[str] = []
