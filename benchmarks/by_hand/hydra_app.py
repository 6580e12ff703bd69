"""A Hydra app as its tutorial begins.

python hydra_app.py --cfg job
"""

import hydra


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    print(config)


if __name__ == "__main__":
    main()
