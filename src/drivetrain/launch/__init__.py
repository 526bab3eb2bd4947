"""Executes one command, from the request to the end of the run.

request    what the user asked for
machine    the devices and processes of this machine that are used
planning   makes the plan; uses profiling (in a survey_process), plan_cache and plan_file
opening    opens the run's directory, new or existing; recorded: reads the recipe of an existing run
local      trains on this machine alone; nodes and rendezvous: on several; launchers and foreign: in workers of another launcher,
           which watcher forks and watches
ending     writes and shows the end; uses summary and report
start      decides which of these a command needs

Other commands: preview (`plan`), smoke (`--smoke`), evaluation (`eval`), trained (loads a run's task and model).
"""
