"""One router from tokens to rows: passes, the random router, what is finished."""
