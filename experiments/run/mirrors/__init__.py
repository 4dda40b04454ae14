"""Where a run shows its metrics beside its folder, which is the record: losing a mirror loses nothing."""
