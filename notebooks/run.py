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
# # Reading a run
#
# Query by query: how values are spread, and which queries fail.

# %% tags=["parameters"]
OVERRIDES = ["+exp=quickstart"]  # of blockrank.eval: the collection and the lists that the runs are of
RUNS = {"BM25": "runs/eval/eval/first_stage/run.trec", "attention": "runs/eval/eval/attention/run.trec"}
MEASURE = "RR@10"
OUTPUT = "figures"

# %%
from IPython.display import Image, Markdown, display

from blockrank.analysis import figures
from blockrank.analysis.runs import query_values, worst_queries
from blockrank.config import build, compose
from blockrank.data.trec import read_run
from blockrank.eval import EvalConfig
from blockrank.evaluation.metrics import evaluate
from blockrank.evaluation.tables import metrics_table
from blockrank.retrieval.lists import open_lists, select_judged

collection = (config := build(EvalConfig, compose("eval", OVERRIDES))).data.open()
held_out = config.held_out(collection)
queries = collection.queries(held_out.split)
_, qrels = select_judged(
    open_lists(collection, held_out), collection.qrels(held_out.split), held_out.max_queries
)
runs = {row: read_run(path) for row, path in RUNS.items()}
reports = {row: evaluate(run, qrels, held_out.measures) for row, run in runs.items()}
first, last = list(runs)[0], list(runs)[-1]
display(Markdown(metrics_table(reports, held_out.measures, baseline=first).to_markdown()))

# %% [markdown]
# ## How values are spread

# %%
display(Image(figures.plot_queries(query_values(reports, MEASURE), MEASURE, f"{OUTPUT}/queries.png")))

# %% [markdown]
# ## The worst queries

# %%
display(Markdown(worst_queries(reports[last], MEASURE, runs[last], qrels, queries).to_markdown()))
