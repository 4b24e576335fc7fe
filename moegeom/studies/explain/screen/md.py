"""Markdown of GitHub: the verdict, the hypotheses, a line for each layer."""

from __future__ import annotations

from moegeom.document._reporter import Reporter, View
from moegeom.document.header import gate_rule_line, routers_line, rule_line, tokens_line
from moegeom.document.markdown import escaped, table_row
from moegeom.document.untrusted import printable
from moegeom.studies.explain.record import Explanation
from moegeom.studies.explain.screen._wording import (
    details,
    equal,
    first_seen,
    growth,
    is_held_back,
    limits,
    mean_share,
    percent,
    ranked,
    sides,
    summary_of,
    ties_legend,
    verdict_text,
    whose_inputs,
)

_LAYER_HEADS = (
    *("layer", "equal sets", "agreed before", "first to switch", "noise makes"),
    *("noise on the input", "roundings to bfloat16", "beyond noise"),
)


def render(explanation: Explanation, view: View) -> str:
    """Header, verdict and tables as GitHub-flavoured Markdown; every hypothesis and layer."""
    explanation = printable(explanation)
    run, summary = explanation.run, summary_of(explanation)
    lines = [f"## moegeom explain: {escaped(run['checkpoint']['name'])}", ""]
    lines += [escaped(rule_line(summary)), ""]
    facts = [("routers", routers_line(summary)), ("rule", gate_rule_line(run))]
    facts += [("A", tokens_line(summary)), *sides(explanation)]
    lines += [f"- **{label}** {escaped(text)}" for label, text in facts]
    lines += ["", f"**Verdict** {escaped(verdict_text(explanation))}", ""]
    if explanation.verdict.remedy:
        lines += [f"**Next** {escaped(explanation.verdict.remedy)}", ""]
    names = ranked(explanation, all_of_them=True)
    if names:
        lines += [f"{whose_inputs(explanation)}:", "", table_row(("", "first layer", "all layers"))]
        lines.append(table_row(["---"] * 3))
        for name in names:
            first = explanation.layers[0].tried_as(name)
            star = " \\*" if is_held_back(explanation, name) else ""
            text = f"{escaped(first_seen(explanation, name).text)}{star}"
            bold = f"**{text}**" if name == explanation.verdict.hypothesis else text
            share = "-" if first is None else equal(first.share)
            lines.append(table_row((bold, share, equal(mean_share(explanation, name)))))
        lines.append("")
        if legend := ties_legend(explanation, names):
            lines += [escaped(legend), ""]
    lines += [table_row(_LAYER_HEADS), table_row(["---"] * len(_LAYER_HEADS))]
    for layer in explanation.layers:
        noise, noisy = layer.noise, ("-",) * 5
        if noise is not None:
            noisy = (
                percent(noise.observed),
                percent(noise.expected),
                percent(noise.scale),
                f"{noise.roundings:.2g}",
                f"{noise.num_beyond:,}",
            )
        place = escaped(summary.place(layer.router))
        lines.append(table_row((place, equal(layer.agreement), f"{layer.num_clean:,}", *noisy)))
    told = [growth(explanation), *details(explanation), *limits(explanation)]
    lines += ["", *(f"- {escaped(text)}" for text in told if text)]
    return "\n".join(lines) + "\n"


REPORTER = Reporter("md", render)
