"""docs/dashboards.md lists what there is: its generated parts are rebuilt and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboards.docs_page import with_parts

PAGE = (Path(__file__).parents[2] / "docs" / "dashboards.md").read_text(encoding="utf-8")


def test_the_page_lists_every_metric_label_and_dashboard() -> None:
    """`python -m dashboards.docs_page docs/dashboards.md`."""
    assert with_parts(PAGE) == PAGE


def test_a_page_without_a_place_is_refused() -> None:
    """A part whose markers were lost would never be written again."""
    with pytest.raises(ValueError, match="no place for labels"):
        with_parts(PAGE.replace("<!-- labels: end -->", ""))
