"""FlashRL's variables, names and files for vLLM's engines, on top of the appliance. Nothing of `appliance` imports it;
its commands for FlashRL's forms of a profile start unpickle.py, profile_file.py and donor.py as processes.

vLLM finds it by its entry point `flashrl_compat`. A run of ours loads no other plugin than its own (VLLM_PLUGINS in
terms/environment.py), so that these variables mean nothing there.
"""
