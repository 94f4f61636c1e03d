"""Load a checkpoint as determined's users do, and say what its models compute: load.py CHECKPOINT [CLASS]."""

import json
import sys

import model_def
import torch
from determined import pytorch

trial_class = getattr(model_def, sys.argv[2]) if len(sys.argv) > 2 else None
if trial_class is None:
    # From the checkpoint's code/ alone.
    del sys.modules["model_def"]
    sys.path.remove(sys.path[0])
trial = pytorch.load_trial_from_checkpoint_path(sys.argv[1], trial_class=trial_class)
for model in trial.context.models:
    model.eval()
with torch.no_grad():
    found = trial.model(torch.linspace(0, 1, 12).reshape(2, 6))
print("LOADED " + json.dumps([type(trial).__name__, found.flatten().tolist()]))
