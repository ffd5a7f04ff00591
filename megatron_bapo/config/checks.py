def check_config(c): return []
def resume_conflicts(a,b): return []
