"""The journey of one command, from a request to a run that has ended.

request    what was asked
machine    the part of this machine that is used
planning   the plan: profiling (in a survey_process) and plan_cache below it, plan_file beside it
opening    the run's directory, new or to go on; recorded: the recipe it has
local      training on this machine alone; nodes and rendezvous: on several; launchers and foreign: under another launcher
ending     what is written at the end: summary, report
start      which of these a command needs

Beside the journey: preview (what `plan` shows), smoke (`--smoke`), evaluation (`eval`), trained (a run's task and model).
"""
