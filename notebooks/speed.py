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
# # Latency over N, and where the speed-up comes from
#
# From the `results.json` of `python -m blockrank.bench`.

# %% tags=["parameters"]
RESULTS = "runs/bench/results.json"
CANDIDATES = None  # of the decomposition; None: the longest lists that have one
OUTPUT = "figures"

# %%
from IPython.display import Image, Markdown, display

from blockrank.analysis.speed import SpeedResults

results = SpeedResults.read(RESULTS)
display(Markdown(results.table().to_markdown()))

# %%
display(Image(results.draw_latency(f"{OUTPUT}/latency.png")))

# %% [markdown]
# Each bar has one thing less to do than the one above it; the factors multiply to the whole.

# %%
display(Image(results.draw_decomposition(f"{OUTPUT}/decomposition.png", CANDIDATES)))
