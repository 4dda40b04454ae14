"""Find wrong labels: `python -m experiments.studies.clean [seeds=[0]] [methods=[CG,T1-T2]] [KEY=VALUE ...]`.

Two fifths of the labels of Omniglot's drawings are wrong. A weight of each drawing is learned on others whose labels
are right, by one hypergradient after the other, beside learning to reweight and a learned loss; and a network is
trained with these weights, on all drawings, and on the clean ones. The same command goes on where it ended. In
`folder`:

    METHOD/SEED/result.json  accuracies, how wrong labels were found, seconds and bytes of the loop, its curve
    clean.md, clean.png      the table, and the figure
    results.json             the results of all cells
    settings.json            what was configured; provenance.json: commit, versions, platform, command line
    wandb/                   the offline mirror
"""

from __future__ import annotations

from experiments.studies.clean.cells import cells
from experiments.studies.clean.report import figures, report
from experiments.studies.clean.schema import CleanConfig, check
from experiments.studies.study import Study

study = Study(
    "clean", CleanConfig, cells=cells, report=report, figures=figures, check=check, free=["methods"]
)

if __name__ == "__main__":
    study.main()
