from pathlib import Path
import yaml
from megatron_bapo.config.schema import Config
def load_config(path, overrides):
    d=yaml.safe_load(Path(path).read_text())
    for o in overrides:
        k,v=o.split('=',1); n=d
        for p in k.split('.')[:-1]: n=n.setdefault(p,{})
        n[k.split('.')[-1]]=yaml.safe_load(v)
    return Config.model_validate(d)
def dump_config(c): return yaml.safe_dump(c.model_dump(mode='json'),sort_keys=False)
