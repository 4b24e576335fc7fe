"""What plug-in authors and our own tests share: made-up checkpoints and tokens with known defects."""
