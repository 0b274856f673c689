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
# # Which layer and which tokens rank
#
# Every layer, and every token of the suffix that could be a signal, read alone on validation lists. `python -m
# blockrank.analyze` does the same and writes `readout.yaml`.

# %% tags=["parameters"]
OVERRIDES = ["+exp=quickstart", "model=smollm2", "validation.max_queries=16"]  # or checkpoint=runs/quickstart
OUTPUT = "figures"

# %%
from pathlib import Path

from IPython.display import Image, Markdown, display

from blockrank.analysis import report
from blockrank.analysis.command import open_model
from blockrank.analysis.readings import SignalReader
from blockrank.analysis.settings import AnalyzeConfig
from blockrank.analysis.study import ValidationLists, study_signals
from blockrank.config import build, compose

config = build(AnalyzeConfig, compose("analyze", OVERRIDES))
opened = open_model(config)
validation = ValidationLists.open(config.data.open(), config.held_out())
reader = SignalReader(opened.source.model, opened.encoder, opened.settings)

# %%
options = {"measure": config.measure, "max_signals": config.max_signals, "samples": config.samples, "seed": config.seed}
found = study_signals(reader, validation, opened.score_layer, **options)
layers, tokens = report.draw_signals(found, Path(OUTPUT))

# %% [markdown]
# ## Layers

# %%
display(Image(layers), Markdown(report.layers_table(found).to_markdown()))

# %% [markdown]
# ## Tokens

# %%
display(Image(tokens), Markdown(report.best_tokens_table(found, "Single tokens").to_markdown()))

# %% [markdown]
# ## What that is worth

# %%
display(Markdown(report.readouts_table(found).to_markdown()), Markdown(report.verdict(found)))
