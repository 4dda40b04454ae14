"""Few-shot classification: tasks with few classes and few examples of each."""

from metagrad.tasks.fewshot.few_shot import FewShot
from metagrad.tasks.fewshot.image_folders import ImageFolders

__all__ = ["FewShot", "ImageFolders"]
