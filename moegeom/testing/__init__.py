"""What plug-in authors and our own tests share: checkpoints and tokens with known defects."""
