"""The page's style sheet: light and dark, and tables as cards where a screen is narrow."""

import base64
import hashlib

CSS = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1b1f24;--soft:#57606a;
--edge:#d7dce2;--open:#b3261e;--open-bg:#fdecea;--part:#8a5a00;--part-bg:#fff4dc;--closed:#17703a;
--bar:#6b7f99}
@media (prefers-color-scheme:dark){:root{--page:#0f1318;--card:#181d24;--text:#e6e9ed;
--soft:#9aa5b1;--edge:#2d3540;--open:#ff8a80;--open-bg:#3a1a1a;--part:#f0b849;--part-bg:#33270f;
--closed:#6fd08c;--bar:#8aa0bd}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:75rem;margin:0 auto;padding:1rem}
header{display:flex;flex-wrap:wrap;gap:.25rem 1rem;align-items:baseline}
h1{font-size:1.35rem;margin:0}
h2{font-size:1rem;margin:1.75rem 0 .5rem}
.soft{color:var(--soft)}
.open{color:var(--open)}.part{color:var(--part)}.closed{color:var(--closed)}
.state{font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.6rem;
margin-top:1rem}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:.6rem .8rem}
.tile b{display:block;font-size:1.25rem;font-weight:600}
.problems{list-style:none;margin:0;padding:0}
.problems li{color:var(--text);border-left:4px solid var(--part);background:var(--part-bg);
padding:.5rem .75rem;margin:.35rem 0;border-radius:0 6px 6px 0;overflow-wrap:anywhere}
.problems li.open{border-color:var(--open);background:var(--open-bg)}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--edge);border-radius:8px}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.4rem .7rem;border-bottom:1px solid var(--edge);vertical-align:top;
overflow-wrap:anywhere}
th{color:var(--soft);font-size:.78rem;font-weight:600;white-space:nowrap}
tr:last-child td{border-bottom:0}
td.number{font-variant-numeric:tabular-nums}
code{font:13px ui-monospace,SFMono-Regular,Consolas,monospace}
.spark{display:block}.spark .passed{fill:var(--bar)}.spark .failed{fill:var(--part)}
footer{margin:2rem 0 1rem;color:var(--soft);font-size:.85rem}
@media (max-width:44rem){thead{display:none}tr{display:block;padding:.4rem 0;
border-bottom:1px solid var(--edge)}tr:last-child{border-bottom:0}
td{display:flex;gap:.75rem;border:0;padding:.15rem .7rem}
td::before{content:attr(data-label);flex:0 0 6.5rem;color:var(--soft);font-size:.8rem}}
"""

_DIGEST = base64.b64encode(hashlib.sha256(CSS.encode()).digest()).decode()

# No script, nothing from elsewhere, and no other page may frame it.
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Value of Content-Security-Policy."""
