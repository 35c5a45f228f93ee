"""The timeline: which request had which slot of the batch in which step, recorded while the engine runs.

recorder.py       records every step in the engine, within a limit of memory
chunks.py         what it records: consecutive steps as columns, and what each slot did as runs
open_runs.py      finds what changed in a step
chunk_json.py     chunks as JSON, for viewers
steps.py          the steps of a recording one by one, for programs that measure
stream.py         the past and the present of an engine for one viewer; chunks as JSON, once for all viewers of a key
trace.py          a recording as a Chrome trace, which Perfetto opens
neighbours.py     which other requests made one slow
terminal.py       the same in a terminal (`inflight top`)
"""
