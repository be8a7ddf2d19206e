"""Real faults on real processes and real connections, from outside.

- `proxy`: a TCP proxy that cuts, delays, drops, stalls, corrupts, throttles, truncates;
- `processes`: kills and pauses by seed;
- `stream`: the pure part of the proxy; `commands`: the `holdfast chaos` commands.

Nothing here knows what the victims do, and no other part of Holdfast imports it except
the CLI: chaos works on pids and ports. What it does is decided by a seed.
"""
