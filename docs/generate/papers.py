"""Links from citations in generated pages to the papers."""

from __future__ import annotations

import re

# citation as the comments of the schema and of the presets write it -> arXiv number
PAPERS = {
    "Schulman et al. 2017": "1707.06347",
    "Ye et al. 2020": "1912.09729",
    "Ouyang et al. 2022": "2203.02155",
    "Li et al. 2024": "2310.10505",
    "Shao et al. 2024": "2402.03300",
    "Ahmadian et al. 2024": "2402.14740",
    "Hu 2025": "2501.03262",
    "Yu et al. 2025": "2503.14476",
    "Liu et al. 2025": "2503.20783",
    "Cui et al. 2025": "2505.22617",
    "MiniMax 2025": "2506.13585",
    "Zheng et al. 2025": "2507.18071",
    "Gao et al. 2025": "2511.20347",
}

_CITATION = re.compile("|".join(rf"\b{re.escape(citation)}\b" for citation in PAPERS))


def link_papers(text: str) -> str:
    """Turn every known citation in Markdown `text` into a link to its paper."""
    return _CITATION.sub(lambda found: f"[{found[0]}](https://arxiv.org/abs/{PAPERS[found[0]]})", text)
