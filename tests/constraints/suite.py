"""Counts how the JSON Schema Test Suite fares: schemas accepted and rejected, and answers that violate their schema.

    python -m tests.constraints.suite path/to/JSON-Schema-Test-Suite/tests/draft2020-12 [--list]

The suite is not part of this repository; the source distribution of the `jsonschema` package contains it in `json/`.
An accepted schema is wrong if its grammar accepts an instance that the suite calls invalid, or if a random walk through
the grammar ends in a text that a validator rejects. Valid instances that a grammar does not accept are counted too:
answers then have less variety than the schema allows, but they are still valid.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs

from inflight import StructuredOutputs
from inflight.errors import ParameterError
from tests.constraints.walking import NoEndError, accepts_value, compiler, walk

NUM_WALKS = 5


def invalid_walks(schema: Any, constraint: StructuredOutputs) -> list[str]:
    """Return random texts of the grammar that the schema forbids."""
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    texts = []
    for seed in range(NUM_WALKS):
        with contextlib.suppress(NoEndError):
            texts.append(walk(constraint, seed))
    return [text for text in texts if not validator.is_valid(json.loads(text, parse_float=_finite))]


def _finite(text: str) -> float:
    return max(-1e308, min(1e308, float(text)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--list", action="store_true", help="print every rejected schema and its error")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for path in sorted(arguments.folder.rglob("*.json")):
        for group in json.loads(path.read_text()):
            name = f"{path.relative_to(arguments.folder)}: {group['description']}"
            schema = group["schema"]
            constraint = StructuredOutputs(json=schema)
            counts["schemas"] += 1
            try:
                compiler().compile(constraint)
            except ParameterError as error:
                has_valid = any(test["valid"] for test in group["tests"])
                counts["rejected" if has_valid else "rejected, without a valid instance"] += 1
                reasons[f"{error.code}: {str(error).partition(': ')[2][:60]}"] += 1
                if arguments.list:
                    print(f"REJECTED {name}: {error}\n    {json.dumps(schema)[:300]}")
                continue
            counts["accepted"] += 1
            for text in invalid_walks(schema, constraint):
                counts["wrong walks"] += 1
                print(f"WRONG WALK {name}: {text}")
            for test in group["tests"]:
                is_accepted = accepts_value(constraint, test["data"])
                if is_accepted and not test["valid"]:
                    counts["wrong instances"] += 1
                    print(f"WRONG {name}: {json.dumps(test['data'])} is accepted ({test['description']})")
                if test["valid"]:
                    counts["valid instances accepted" if is_accepted else "valid instances refused"] += 1
                    if arguments.list and not is_accepted:
                        print(f"REFUSED {name}: {json.dumps(test['data'])} ({test['description']})")
    for reason, count in reasons.most_common():
        print(f"{count:4} {reason}")
    for label, count in counts.items():
        print(f"{label}: {count}")


if __name__ == "__main__":
    main()
