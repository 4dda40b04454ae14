import numpy as np

from metagrad.tasks.omniglot.splits import SPLITS, Character

PARTS = {  # each split, its characters, and how the array file marks them
    "train": (1028, lambda t: t["char_vinyals"] == 0),
    "validation": (172, lambda t: t["char_vinyals"] == 1),
    "trainval": (1200, lambda t: t["char_vinyals"] <= 1),
    "test": (423, lambda t: t["char_vinyals"] == 2),
    "background": (964, lambda t: t["char_background"]),
    "evaluation": (659, lambda t: ~t["char_background"]),
    "small1": (136, lambda t: t["char_small1"]),
}


def test_sizes_of_splits_and_parts_that_are_disjoint_and_complete():
    for name, (size, _) in PARTS.items():
        assert len(SPLITS[name].characters) == len(set(SPLITS[name].characters)) == size
    for parts in (("train", "validation", "test"), ("trainval", "test"), ("background", "evaluation")):
        assert len({c for part in parts for c in SPLITS[part].characters}) == 1623


def test_splits_equal_the_membership_that_comes_with_the_data(real_bits):
    with np.load(real_bits, allow_pickle=False) as arrays:
        table = {name: arrays[name] for name in arrays.files if name != "images_packed"}
    for name, (_, select) in PARTS.items():
        mask = select(table)
        alphabets = table["alphabet_names"][table["char_alphabet"]][mask].tolist()
        assert SPLITS[name].characters == tuple(
            map(Character, alphabets, table["char_number"][mask].tolist())
        )
