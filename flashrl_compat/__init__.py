"""FlashRL's variables, names and files for vLLM's engines, on top of the appliance. Nothing of `appliance` imports it;
`appliance convert-profile` starts unpickle.py and profile_file.py as processes.

vLLM finds it by its entry point `flashrl_compat`. A run of ours loads no other plugin than its own (VLLM_PLUGINS in
terms/environment.py), so that these variables mean nothing there.
"""
