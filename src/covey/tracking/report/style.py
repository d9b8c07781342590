"""The style sheet of a report: light and dark, for narrow screens and for paper."""

# The colours of charts are the variables --s1 ... ; `charts` writes them into the SVG.
LIGHT = """
--paper:#fff;--panel:#f7f8fa;--ink:#1f2430;--muted:#5b6472;--line:#dfe3ea;--grid:#e5e7eb;--good:#15803d;--bad:#b91c1c;
--warn:#92400e;--warn-back:#fef6e6;--bad-back:#fdf0f0;--good-back:#eef8f1;
--s1:#2563eb;--s2:#c2410c;--s3:#0f766e;--s4:#7c3aed;--s5:#be185d;--s6:#a16207;--s7:#4d7c0f;--s8:#475569"""
DARK = """
--paper:#14171d;--panel:#1c2029;--ink:#e6e9ef;--muted:#a2abba;--line:#333a47;--grid:#2a303b;--good:#4ade80;--bad:#f87171;
--warn:#fbbf24;--warn-back:#2b2416;--bad-back:#2d1a1c;--good-back:#16271d;
--s1:#7aa5ff;--s2:#fb923c;--s3:#4fd1c5;--s4:#b794ff;--s5:#f472b6;--s6:#facc15;--s7:#a3e635;--s8:#cbd5e1"""

STYLE = (
    (
        ":root{color-scheme:light dark;" + LIGHT + "}"
        "@media (prefers-color-scheme:dark){:root{" + DARK + "}}"
        "@media print{:root{color-scheme:light;" + LIGHT + "}}"
    )
    + """
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:1.5rem 1.25rem 4rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.75rem;line-height:1.2;margin:.25rem 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.5rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--line);overflow-wrap:anywhere}
h3{font-size:1.05rem;margin:1.75rem 0 .5rem;overflow-wrap:anywhere}
h4{font-size:1rem;margin:1rem 0 .25rem}
p{margin:.5rem 0}
.muted,.note{color:var(--muted)}
.note{font-size:.9rem}
.badge{display:inline-block;border:1px solid currentColor;border-radius:1rem;padding:0 .6rem;font-size:.85rem;
font-weight:600;color:var(--muted)}
.badge.finished{color:var(--good)}.badge.running{color:var(--s1)}.badge.stopped{color:var(--warn)}
.badge.crashed{color:var(--bad)}
.facts{display:flex;flex-wrap:wrap;gap:.25rem 1.5rem;margin:.75rem 0;padding:0;list-style:none}
.facts b{font-weight:600}
.headline{font-size:1.15rem;font-weight:600;margin:.75rem 0}
.good{color:var(--good)}.bad{color:var(--bad)}
.scroll{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;font-size:.92rem;min-width:min(100%,20rem)}
th,td{text-align:left;padding:.35rem .9rem .35rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--muted);font-weight:600;white-space:nowrap}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td{overflow-wrap:anywhere}
td code{white-space:pre-wrap}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.86em}
code{overflow-wrap:anywhere}
pre{margin:.35rem 0;white-space:pre-wrap;overflow-wrap:anywhere;tab-size:4}
pre.text,pre.command{background:var(--panel);border-radius:.4rem;padding:.5rem .7rem}
pre.nothing{color:var(--muted)}
.finding{border-left:4px solid var(--warn);background:var(--warn-back);border-radius:.3rem;padding:.5rem .9rem;
margin:.6rem 0;break-inside:avoid}
.finding.problem{border-color:var(--bad);background:var(--bad-back)}
.finding.fine{border-color:var(--good);background:var(--good-back)}
.finding p{margin:.2rem 0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,19rem),1fr));gap:1rem 1.5rem;
margin-top:1rem}
figure{margin:0;break-inside:avoid}
figcaption{font-weight:600;font-size:.95rem}
figcaption span{font-weight:400;color:var(--muted)}
figure svg{width:100%;height:auto;display:block}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figure svg text{font-family:inherit!important}
.narrow{display:none}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1.25rem;margin:.25rem 0;padding:0;list-style:none;font-size:.9rem;
overflow-wrap:anywhere}
.mark{display:inline-block;width:1.4rem;height:0;border-top:3px solid;vertical-align:middle;margin-right:.4rem}
.mark.dot{width:.65rem;height:.65rem;border-radius:50%;border:0;background:currentColor}
.c1{color:var(--s1)}.c2{color:var(--s2)}.c3{color:var(--s3)}.c4{color:var(--s4)}
.c5{color:var(--s5)}.c6{color:var(--s6)}.c7{color:var(--s7)}.c8{color:var(--s8)}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:0 1.25rem;break-inside:avoid;margin:.75rem 0 1.25rem}
.pair>.prompt{grid-column:1/-1}
.label{font-size:.85rem;color:var(--muted)}
.rollouts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,21rem),1fr));gap:.5rem 1.25rem}
.rollout{break-inside:avoid}
.rollout .label b{color:var(--ink)}
.turn{border-left:3px solid var(--line);padding-left:.6rem;margin:.4rem 0}
.turn.model{border-color:var(--s1)}
details{margin:.75rem 0}
summary{cursor:pointer;font-weight:600}
footer{margin-top:3rem;border-top:1px solid var(--line);padding-top:.75rem}
a{color:var(--s1)}
nav a{margin-right:1rem;overflow-wrap:anywhere}
@media (max-width:42rem){body{padding:1rem .9rem 3rem}.wide{display:none}.narrow{display:block}
.pair{grid-template-columns:1fr}h1{font-size:1.4rem}}
@media print{body{max-width:none;font-size:11pt;padding:0}.charts{grid-template-columns:1fr 1fr}
.scroll{overflow:visible}h2,h3,h4{break-after:avoid}}
"""
)
