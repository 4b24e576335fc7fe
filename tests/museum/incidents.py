"""Every incident that weights alone can show, in the order of the page."""

from __future__ import annotations

from tests.museum import (
    exhibit_bias_precision,
    exhibit_bias_updates,
    exhibit_configs,
    exhibit_copies,
    exhibit_renumbering,
    exhibit_revisions,
    exhibit_rounding,
    exhibit_rows,
    exhibit_slices,
    exhibit_smoothing,
    exhibit_storage,
    exhibit_tables,
    exhibit_untrained,
)

INCIDENTS = (
    *exhibit_bias_precision.INCIDENTS,
    *exhibit_bias_updates.INCIDENTS,
    *exhibit_rounding.INCIDENTS,
    *exhibit_smoothing.INCIDENTS,
    *exhibit_copies.INCIDENTS,
    *exhibit_renumbering.INCIDENTS,
    *exhibit_rows.INCIDENTS,
    *exhibit_revisions.INCIDENTS,
    *exhibit_slices.INCIDENTS,
    *exhibit_storage.INCIDENTS,
    *exhibit_configs.INCIDENTS,
    *exhibit_tables.INCIDENTS,
    *exhibit_untrained.INCIDENTS,
)
