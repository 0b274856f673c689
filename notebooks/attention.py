# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Where attention goes
#
# Under dense causal attention a model that ranks needs little of what one document could say to another (section 3 of
# [arXiv 2510.05396](https://arxiv.org/abs/2510.05396)); and some tokens of the suffix look at the relevant document.

# %% tags=["parameters"]
OVERRIDES = ["+exp=quickstart", "model=smollm2", "validation.max_queries=8"]  # or checkpoint=runs/quickstart
LAYERS = (12, 16)  # of the map between parts; the paper shows 16 to 21 of 32
LISTS = 4  # read under dense attention, whose cost is quadratic
OUTPUT = "figures"

# %%
from itertools import islice

from IPython.display import Image, Markdown, display

from blockrank.analysis import figures
from blockrank.analysis.command import open_model
from blockrank.analysis.report import shares_table
from blockrank.analysis.settings import AnalyzeConfig
from blockrank.analysis.study import ValidationLists, attention_maps, mean_shares, suffix_masses
from blockrank.config import build, compose

config = build(AnalyzeConfig, compose("analyze", OVERRIDES))
opened = open_model(config)
validation = ValidationLists.open(config.data.open(), config.held_out())
model = (opened.source.model, opened.encoder, opened.settings)

# %% [markdown]
# ## Between the parts of a prompt
#
# A row is the mean over the tokens of a part, heads and layers; it sums to 1.

# %%
found = list(islice(attention_maps(*model, validation.lists), LISTS))
candidates, attention = found[0]
display(Image(figures.plot_parts(attention.mean(*LAYERS), f"{OUTPUT}/map.png", title=f"layers {LAYERS}")))

# %% [markdown]
# ## Documents: prefix, themselves, each other

# %%
shares = mean_shares([attention for _, attention in found])
display(Image(figures.plot_shares(shares, f"{OUTPUT}/sparsity.png")))
display(Markdown(shares_table(shares, len(found)).to_markdown()))

# %% [markdown]
# ## From the suffix to the documents
#
# The softmax is over document tokens only, as the readout has it; the star marks a relevant document.

# %%
masses, tokens, places = suffix_masses(*model, candidates, opened.score_layer)
grades = validation.qrels[candidates.query.id]
relevant = [row for row, i in enumerate(places) if grades.get(candidates.documents[i].id, 0) > 0]
display(Image(figures.plot_suffix(masses, [repr(t)[1:-1] for t in tokens], f"{OUTPUT}/suffix.png", relevant=relevant)))
