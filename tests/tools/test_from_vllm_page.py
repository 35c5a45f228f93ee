"""The tables of docs/from-vllm.md that repeat data are up to date."""

from __future__ import annotations

import re

from tools.from_vllm_page import PAGE, TABLES, page


def test_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run python -m tools.from_vllm_page"


def test_rows_are_written_from_the_data() -> None:
    text = PAGE.read_text(encoding="utf-8")
    titles = "|".join(TABLES)
    sections = re.findall(rf"\n## (?:{titles})\n.*?(?=\n## |\Z)", text, re.S)
    assert len(sections) == len(TABLES)
    for section in sections:
        wrong = re.sub(r"^(\| `.* \| absent \| ).*", r"\1no reason |", section, flags=re.M)
        assert wrong != section
        assert page(text.replace(section, wrong)) == text
