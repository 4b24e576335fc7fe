"""Choices of experts that engines and trainers wrote down, read as tokens.

1. ``trace``: a *dialect* reads a file piece by piece and yields requests with ids, as stored.
2. ``axes``: the shapes and values of ids say which axis is layers, and which index is which router.
3. ``cleaning``: of each request, the rows that are tokens, and their positions; the rest is cut and
   counted, or refused.
4. ``survey``: the first pass does 1 to 3 for every file and keeps a ``Survey`` of each, then puts
   them together into a ``TokenIndex``: where each token lies, and the notes about what was cut.
5. ``source``: a scan asks for ranges of tokens; their pieces are read and cleaned again.
6. ``alignment``: choices of two runs are matched by document, position and token id, and the
   choices themselves prove the place.

Between 1 and 2, ``expert_map`` replaces physical places by experts, where a map is given.
"""
