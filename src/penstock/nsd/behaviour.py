"""MindEye2's view of behaviour: 17 numbers for a trial, for those around it, and for the others that show its picture.

-1 stands for what is not known (NaN in ``responses.tsv``) and for trials that are not there.
"""

import numpy as np

from penstock.dataset.gather import NO_ROW
from penstock.nsd.layout import REPS
from penstock.nsd.repetitions import by_picture, neighbours
from penstock.nsd.table import TrialTable

COLUMNS = (
    "stim_id", "subject", "session", "run", "trial_in_run", "global_trial", "time", "isold", "iscorrect", "rt",
    "changemind", "isoldcurrent", "iscorrectcurrent", "total1", "total2", "button", "shared1000",
)  # fmt: skip
"""Of the trial table, in MindEye2's order."""
AROUND = 15
"""Trials before and after."""
FIELDS = ("behav", "past_behav", "future_behav", "olds_behav")


def behaviour(trials: TrialTable, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The behaviour of these rows of the table: (1, 17), (15, 17), (15, 17) and (3, 17) each, as float64."""
    values = _values(trials)
    past, future = neighbours(trials["session"], rows, AROUND, AROUND)
    found = {"behav": rows[:, None], "past_behav": past, "future_behav": future, "olds_behav": _others(trials, rows)}
    return {name: values[lines] for name, lines in found.items()}  # the line of NO_ROW is the last, all -1


def _values(trials: TrialTable) -> np.ndarray:
    table = np.full((len(trials) + 1, len(COLUMNS)), -1.0)
    for place, name in enumerate(COLUMNS):
        if name in trials:
            column = np.asarray(trials[name], np.float64)
            table[:-1, place] = np.where(np.isnan(column), -1, np.trunc(column) if name == "time" else column)
    return table


def _others(trials: TrialTable, rows: np.ndarray) -> np.ndarray:
    """(samples, 3): the other trials that show the same picture, in order, those that are there first."""
    stim_ids = trials["stim_id"]
    lines = by_picture(stim_ids, np.arange(len(stim_ids)))[:, :REPS]
    line_of = np.empty(int(stim_ids.max()) + 1, np.int64)
    line_of[stim_ids[lines[:, 0]]] = np.arange(len(lines))
    same = lines[line_of[stim_ids[rows]]]
    same[same == rows[:, None]] = NO_ROW
    order = np.argsort(same == NO_ROW, axis=1, kind="stable")
    return np.take_along_axis(same, order, axis=1)
