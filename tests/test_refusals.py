"""What cannot work is refused in words: by the config, by the command, or by the worker before there is a run.

A row of a table has the words that are typed, and parts of the message, with bars between. A row that begins with
spaces continues the one before.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scaleflow import __version__
from scaleflow.commands.table import find_command
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.launcher import launch
from tests.training.fake_engine import ignore, run_apart

#: Refused when the words are parsed. A message about one key begins with it.
BY_THE_CONFIG = """
# Wrong values
training.epochs=abc | expected an integer, at least 1 or by_size
training.epochs=true | expected an integer, at least 1 or by_size
training.epochs=1.5 | expected an integer, at least 1 or by_size
training.epochs=null | expected an integer, at least 1 or by_size
training.epochs=0 | expected an integer, at least 1 or by_size
training.epochs=-1 | expected an integer, at least 1 or by_size
'training.epochs=[1]' | expected an integer, at least 1 or by_size
'training.epochs={a: 1}' | expected an integer, at least 1 or by_size
training.batch_size=0 | expected an integer, at least 1 or one of auto, by_size
training.batch_size=2147483648 | expected an integer, at most 2147483647
'hardware.devices=[99999999999]' | expected an integer, at most 2147483647
training.accumulate=-2 | expected an integer, at least 1
training.global_batch_size=0 | expected an integer, at least 1, or null
training.steps_per_epoch=0 | expected an integer, at least 1, or null
training.max_steps=-5 | expected an integer, at least 1, or null
training.steps_per_loop=0 | expected an integer, at least 1 or auto
training.steps_per_loop=many | expected an integer, at least 1 or auto
training.clip_norm=0 | expected a number, above 0.0, or null
training.clip_norm=-1.0 | expected a number, above 0.0, or null
training.clip_norm=.inf | expected a number, above 0.0, or null
training.engine=keras | expected one of loop, fit
training.step=3 | expected {_target_: the dotted name of a class or function, and its arguments}, or null
training.step=my_code.step | expected {_target_: the dotted name
objective.loss=3
    | expected {_target_: the dotted name of a class or function, and its arguments} or a short name or {NAME:
'objective.loss_weights={age: heavy}' | expected {NAME: a number, at least 0.0}, or null
'objective.metrics={_target_: keras.metrics.AUC}' | expected a list such as [auc, {_target_:
objective.class_weight=balancd | expected balanced or {NAME: a number, at least 0.0} or {NAME: balanced or {
'objective.class_weight={0: -1}' | expected balanced or {NAME: a number, at least 0.0}
objective.label_smoothing=1.5 | expected a number, at least 0.0, at most 1.0
training.early_stopping=3
    | expected auto or {monitor, patience, mode, min_delta, start_epoch, threshold, restore_best}, or null
'training.early_stopping={patience: 0}' | training.early_stopping.patience= | expected an integer, at least 1
'training.early_stopping={mode: up}' | training.early_stopping.mode= | expected one of auto, min, max
hardware.logical_devices=0 | expected an integer, at least 1
hardware.logical_devices=two | expected an integer, at least 1
hardware.memory_growth=1 | expected true or false
hardware.deterministic=yes | expected true or false
hardware.xla=1 | expected true or false or auto
hardware.remat=auto | expected true or false or a list such as [a, b]
'hardware.remat=[1]' | expected true or false or a list such as [a, b]
'hardware.remat=[]' | the list names no layers; name layers, such as hardware.remat=[block*]
hardware.intra_op_threads=0 | expected an integer, at least 1, or null
hardware.inter_op_threads=-1 | expected an integer, at least 1, or null
hardware.devices=0 | expected a list such as [0, 1], or null
'hardware.devices=[a]' | expected a list such as [0, 1], or null
'hardware.devices=[true]' | expected a list such as [0, 1], or null
'hardware.devices=[]' | give at least one index, or null for all devices
'hardware.devices=[-1]' | give different indices, counted from 0
'hardware.devices=[0, 0]' | give different indices, counted from 0
dataset.limit=0 | expected an integer, at least 1, or null
dataset.limit=some | expected an integer, at least 1, or null
dataset.validation=true | expected a number or text, or null
dataset.validation=1 | give a fraction from 0 to less than 1
dataset.validation=-0.1 | give a fraction from 0 to less than 1
optimizer.learning_rate=0 | expected a number, above 0.0
optimizer.learning_rate=-0.1 | expected a number, above 0.0
optimizer.learning_rate=.nan | expected a number, above 0.0
optimizer.learning_rate=fast | expected a number, above 0.0
optimizer.schedule=linea | expected one of constant, cosine, step, linear, polynomial, exponential, one_cycle
optimizer.schedule=plateau dataset.validation=null | optimizer.plateau.metric=train/loss
optimizer.schedule=plateau training.engine=fit | training.engine=loop, or the callback
optimizer.schedule=plateau optimizer.step_factor=1 | the rate would never fall
'optimizer.plateau={patience: 2}' | set optimizer.schedule=plateau
optimizer.schedule=plateau 'optimizer.plateau={patience: 0}' | patience=0: expected an integer, at least 1
optimizer.final_rate=2 | expected a number, at least 0.0, at most 1.0
optimizer.warmup_steps=-1 | expected an integer, at least 0
optimizer.scale=square | expected one of none, linear, sqrt
optimizer.base_batch_size=0 | expected an integer, at least 1
tracking.experiment=null | expected text
tracking.tags=3 | expected keys and values
tracking.notify=hooks.slack.com/services/1 | it is no address of the web; type https://HOST/PATH, or slack:
tracking.flush_seconds=-1 | expected a number, at least 0.0
+strategy.stages=1 | expected an integer, at least 2
+strategy.micro_batches=0 | expected an integer, at least 1
+strategy.cuts=dense | expected a list such as [a, b], or null
'+strategy.cuts=[1]' | expected a list such as [a, b], or null
strategy.name=miror | expected one of auto, one_device, mirrored
precision.name=float64 | expected one of float32, mixed, mixed_float16, mixed_bfloat16
model._target_=null | expected the dotted name of a class or function
model._target_=3 | expected the dotted name of a class or function
seed=-1 | expected an integer, at least 0
seed=2147483648 | at most 2147483647
seed=1.5 | expected an integer
debug.inline=maybe | expected true or false
# Exports and promotion
'export.formats=[onx]' | export.formats: there is no format onx; did you mean onnx?
'export.formats=[keras,keras]' | export.formats: keras is there twice; leave one of them out
export.tolerance=0 | expected a number, above 0.0, or null
export.calibration_examples=0 | expected an integer, at least 1
promotion=champion promotion.model=a/b | promotion.model=a/b: expected a name without / : % and quotes
promotion=champion promotion.model=m promotion.confidence=1 | expected a number, above 0.5, below 1.0
evaluation.miss_cost=3 'evaluation.threshold={cost: [5, 1]}' | these are two costs of a miss
evaluation.alarm_cost=3 'evaluation.threshold={cost: [5, 1]}' | these are two costs of a miss
evaluation.alarm_cost=0 | expected a number, above 0.0
promotion=champion promotion.model=m promotion.at_least=3 | expected {NAME: a number}, or null
promotion=champion promotion.model=m 'promotion.at_least={test/profit: 5}'
    | it is not known whether larger values | ends in _score (larger is better), or in _loss, _error
promotion=champion promotion.model=m promotion.environment=new | expected one of here, clean
promotion=champion promotion.model=m tracking=none
    | promotion=champion with tracking=none: there is no store with registered models; use tracking=mlflow
promotion=champion promotion.model=m tracking.register_as=m tracking.alias=champion
    | the run would move the alias before the promotion decides; leave tracking.alias out
# Keys that a strategy's processes cannot follow
strategy=mirrored cluster.workers=2 | cluster.workers=2 with strategy=mirrored: this strategy runs in one process
strategy=multi_worker cluster.servers=2 | cluster.servers=2 with strategy=multi_worker: this strategy has no
strategy=multi_worker cluster.workers=65
    | cluster.workers=65 with cluster=local: one machine runs at most 64 workers; use cluster=ray
strategy=multi_worker cluster=ray cluster.workers=4097 | expected an integer, at least 1, at most 4096
strategy=parameter_server hardware.logical_devices=2 | each worker is one replica on one device; use more
strategy=parameter_server debug=inline
    | debug.inline=true with strategy=parameter_server: each worker needs its own process
strategy=parameter_server cluster.servers=0 | cluster.servers=0: expected an integer, at least 1
strategy=parameter_server strategy.partitioner.max_shards=0
    | strategy.partitioner.max_shards=0: expected an integer, at least 1
strategy=mirrored +strategy.partitioner.max_shards=2
    | strategy.partitioner.max_shards=2 with strategy=mirrored: this strategy has no parameter servers
strategy=mirrored +strategy.communication=ring | this strategy has no workers that communicate
strategy=multi_worker strategy.communication=nccl hardware=cpu | NCCL works only between GPUs; use ring
strategy=parameter_server cluster=tf_config | TF_CONFIG is not set
strategy=parameter_server hardware.xla=true | an XLA program cannot read variables on another machine
strategy=pipeline 'training.step={_target_: a.b}'
    | training.step._target_=a.b with strategy=pipeline: a custom step calls
strategy=pipeline hardware.xla=true | XLA compiles a program for one device, and a pipeline uses several
hardware.remat=true hardware.xla=true | XLA would reuse what is to be computed again
'hardware.remat=[dense]' hardware.xla=true | hardware.remat=['dense'] with hardware.xla=true
hardware.remat=true strategy=tpu | a TPU runs XLA programs
strategy=mirrored +strategy.stages=3 | this strategy does not divide the model; use strategy=pipeline
# Unknown keys
+foo=1 | foo: there is no such key
+trainig.epochs=1 | trainig: there is no such key; did you mean training?
+training.epoch=3 | training.epoch: there is no such key; did you mean training.epochs?
+hardware.logical_device=3 | did you mean hardware.logical_devices?
+precision.policy=mixed | precision.policy: there is no such key
+tracking.password=sesame | tracking.password: there is no such key
'training.early_stopping={patiense: 3}'
    | training.early_stopping.patiense: there is no such key; did you mean training.early_stopping.patience?
# Keys that cannot work together
hardware=cpu strategy=mirrored hardware.logical_devices=3 training.global_batch_size=32
    | training.global_batch_size=32: | 3 replica(s) | use 30 or 33
hardware=cpu training.accumulate=5 training.global_batch_size=32 | training.global_batch_size=32:
    | training.accumulate=5 | use 30 or 35
hardware=cpu strategy=mirrored hardware.logical_devices=4 training.global_batch_size=3 | training.global_batch_size=3:
    | use 4
strategy=tpu hardware=cpu | strategy=tpu with hardware=cpu: | hardware=tpu | strategy=mirrored
strategy=tpu hardware=gpu | strategy=tpu with hardware=gpu: | hardware=tpu | strategy=mirrored
strategy=mirrored hardware=tpu | hardware=tpu with strategy=mirrored: | strategy=tpu | hardware=auto
strategy=one_device hardware.tpu=local | hardware.tpu=local with strategy=one_device | strategy=tpu
hardware=cpu hardware.tpu=local | hardware.tpu=local with strategy=auto | strategy=tpu
strategy=tpu hardware.logical_devices=2 | hardware.logical_devices=2 with hardware=tpu: | leave it 1
hardware=tpu 'hardware.devices=[0]' | hardware.devices=[0] with hardware=tpu: | leave it null
strategy=tpu hardware.memory_growth=true | hardware.memory_growth=true | with hardware=tpu:
strategy=tpu hardware.memory_limit_mb=100 | hardware.memory_limit_mb=100 | with hardware=tpu:
strategy=tpu precision=mixed_float16 | precision=mixed_float16 with hardware=tpu: | precision=mixed_bfloat16
strategy=tpu cluster.workers=2 | cluster.workers=2 with strategy=tpu: | strategy=multi_worker
hardware.tpu=10.0.0.1:8470 | hardware.tpu=10.0.0.1:8470: | grpc://10.0.0.1:8470
hardware=cpu hardware.memory_limit_mb=100 | hardware.memory_limit_mb=100 with hardware=cpu: | hardware=gpu
strategy=pipeline hardware=cpu | strategy.stages=2 with strategy.replicas=1 with hardware.logical_devices=1:
    | exactly one device for each stage of each replica
strategy=pipeline strategy.replicas=2 hardware=cpu hardware.logical_devices=2
    | strategy.stages=2 with strategy.replicas=2 with hardware.logical_devices=2:
    | set hardware.logical_devices to strategy.stages x strategy.replicas
strategy=mirrored +strategy.replicas=2 | strategy.replicas=2 | strategy=mirrored: | use strategy=pipeline
strategy=pipeline strategy.replicas=2 cluster.workers=2 | cluster.workers=2 with strategy=pipeline:
strategy=pipeline strategy.replicas=2 training.global_batch_size=36 | training.global_batch_size=36:
    | strategy.micro_batches=4 x strategy.replicas=2; | use training.global_batch_size=32 or 40,
strategy=pipeline 'strategy.cuts=[a,b]' | strategy.cuts=['a', 'b'] with strategy.stages=2: | one name fewer
strategy=pipeline strategy.stages=3 'strategy.cuts=[]' | strategy.cuts=[] with strategy.stages=3: | one name fewer
strategy=pipeline training.batch_size=50 | training.batch_size=50: | strategy.micro_batches=4
    | use training.batch_size=48 or 52,
strategy=pipeline training.batch_size=3 | use training.batch_size=4, or strategy.micro_batches=1
strategy=pipeline training.global_batch_size=30 training.accumulate=3 | training.global_batch_size=30:
    | strategy.micro_batches=4 x training.accumulate=3 | use training.global_batch_size=24 or 36,
hardware=gpu hardware.memory_limit_mb=100 | hardware.memory_growth=true | hardware.memory_limit_mb=100
hardware=gpu hardware.logical_devices=2 | hardware.logical_devices=2 | hardware.memory_limit_mb
training.engine=fit strategy=multi_worker | strategy=multi_worker: Keras 3's fit works only with
    | use training.engine=loop
training.engine=fit 'training.step={_target_:my.step}' | training.step._target_=my.step | use training.engine=loop
training.engine=fit training.accumulate=2 | training.accumulate=2: | use training.engine=loop
training.engine=fit training.clip_norm=1.0 | training.clip_norm=1.0: | use training.engine=loop
training.engine=fit strategy=mirrored precision=mixed_float16 | precision=mixed_float16 | use training.engine=loop
training.engine=fit strategy=mirrored training.steps_per_loop=4 | training.steps_per_loop=4 with
    | or training.engine=loop
optimizer.schedule=step | optimizer.schedule=step: | optimizer.step_every
'training.early_stopping={monitor:val/loss}' dataset.validation=null | training.early_stopping.monitor=val/loss
    | dataset.validation=null | dataset.validation=0.1 | train/loss
'training.early_stopping={monitor:val/loss}' dataset.validation=0 | dataset.validation=0
debug=nan dataset=csv dataset.data_dir=x.csv dataset.target=y | debug.nan=true | table.Table: | remove debug=nan
# debug
debug=eager hardware.xla=true | debug.eager=true with hardware.xla=true: XLA compiles
debug=eager strategy=mirrored | debug.eager=true with strategy=mirrored: without compilation
debug=eager strategy=parameter_server | debug.eager=true with strategy=parameter_server: only compiled functions
'debug='"'"'nan'"'"'' hardware.xla=true | debug.nan=true with hardware.xla=true: XLA cannot
'debug='"'"'nan'"'"'' precision=mixed_float16 | debug.nan=true with precision=mixed_float16: dynamic loss scaling
# training.on_nan
training.on_nan=rollback training.engine=fit | training.on_nan=rollback with training.engine=fit: Keras's fit
training.on_nan=rollback checkpoint=none
    | training.on_nan=rollback with checkpoint=none: no checkpoints are saved to go back to
training.on_nan=rollback debug=nan | debug.nan=true with training.on_nan=rollback: debug.nan ends
training.on_nan=rollback training.nan_rate_factor=1 | training.nan_rate_factor=1
training.on_nan=rollback training.nan_rollbacks=0 | training.nan_rollbacks=0
# Fine-tuning
model.freeze=dense | model.freeze=dense: expected a list such as [a, b] or {NUMBER: a list such as [a, b]}, or null
'model.freeze={a: [dense]}' | model.freeze={'a': ['dense']}: expected a list such as [a, b] or {NUMBER: a list
'model.freeze={0: dense}' | model.freeze={0: 'dense'}: expected a list such as [a, b] or {NUMBER: a list
'model.freeze={1.5: [dense]}' | model.freeze={1.5: ['dense']}: expected a list
'model.freeze={3: [dense]}' | model.freeze={3: ['dense']}: the first epoch is 0; begin with it: {0: [PATTERN], 3: []}
'model.freeze={-1: [], 0: [dense]}' | model.freeze={-1: [], 0: ['dense']}: the first epoch is 0
'model.freeze={}' | model.freeze={}: the first epoch is 0
'model.freeze={0: [dense], 3: []}' strategy=parameter_server
    | model.freeze={0: ['dense'], 3: []} with strategy=parameter_server: what trains is fixed there
'model.freeze={0: [dense], 3: []}' strategy=pipeline | with strategy=pipeline: what trains is fixed there
'model.lora={rank: 8}' | model.lora.layers=null: it names no layers | model.lora.layers=[dense*]
'model.lora={layers: [dense], rank: 0}' | model.lora.rank=0: expected an integer, at least 1
'optimizer.rate_factors={dense: 0}' | optimizer.rate_factors={'dense': 0.0} | use model.freeze=[PATTERN]
'optimizer.rate_factors={dense: -1}' | optimizer.rate_factors={'dense': -1}: expected {NAME: a number
optimizer.ema=1.0 | optimizer.ema=1.0: expected a number, above 0.0, below 1.0, or null
# profiler
profiler=trace strategy=one_device profiler.steps=1 | profiler.steps=1 | at least 2
profiler=trace strategy=one_device profiler.start_step=1 | profiler.start_step=1 | at least 2
profiler=trace strategy=one_device 'profiler.start_step=[50,1]' | profiler.start_step | at least 2
profiler=trace strategy=one_device 'profiler.start_step=[]' | profiler.start_step=[] | profiler.start_step=50
profiler=trace strategy=one_device profiler.start_step=soon | profiler.start_step=soon | an integer
profiler=trace strategy=one_device 'profiler.start_step=[50,60]' | profiler.start_step=[50, 60]
    | before the previous one ends
profiler=trace strategy=one_device training.max_steps=60 | profiler.start_step=50 | training.max_steps=60
    | train longer
profiler=trace strategy=one_device training.max_steps=10 | profiler.start_step=50 | training.max_steps=10
profiler=trace strategy=one_device debug=fast | profiler=trace | debug.fast
profiler=trace strategy=one_device debug=eager | profiler=trace | debug.eager
profiler=trace strategy=one_device training.engine=fit training.steps_per_loop=4 | profiler=trace
    | training.steps_per_loop=1
# tracking
tracking.uri=runs | tracking.uri=runs: | sqlite:///mlflow.db
tracking.uri=./mlruns | tracking.uri=./mlruns: | sqlite:///mlflow.db
tracking.uri=/tmp/mlruns | tracking.uri=/tmp/mlruns: | sqlite:///mlflow.db
tracking.uri=file:///tmp/mlruns | tracking.uri=file:///tmp/mlruns: | sqlite:///mlflow.db
tracking.uri=file:mlruns | tracking.uri=file:mlruns: | sqlite:///mlflow.db
tracking.uri=sqlite:// | tracking.uri=sqlite://: | sqlite:///mlflow.db
tracking.uri=sqlite:///:memory: | tracking.uri=sqlite:///:memory:: | sqlite:///mlflow.db
tracking.uri=http:// | tracking.uri=http://:
tracking.uri=http://127.0.0.1:99999 | tracking.uri=http://127.0.0.1:99999:
tracking.uri=http://127.0.0.1:port | tracking.uri=http://127.0.0.1:port:
'tracking.uri="http://[::1"' | tracking.uri=http://[::1:
# optimizer
+optimizer.use_ema=true | Keras's moving average of the weights would be neither evaluated nor saved
    | optimizer.ema=0.99
+optimizer.ema_momentum=0.9 | Keras's moving average of the weights would be neither evaluated nor saved
+optimizer.ema_overwrite_frequency=100 | Keras's moving average of the weights would be neither evaluated nor saved
optimizer._target_=mine.Averaged +optimizer.use_ema=true | optimizer.use_ema=true:
# checkpoint
checkpoint.folder=ftp://a/b | checkpoint.folder=ftp://a/b: expected a path, or an address with s3, gs, abfs://
checkpoint.folder=s3:///run | checkpoint.folder=s3:///run: expected the name of a bucket: s3://BUCKET/PATH
checkpoint.folder=s3://user:word@bucket/run | an address must not contain credentials; set them in the
checkpoint.folder=abfs://box@account/run | expected abfs://BUCKET/PATH; set the account and the
'checkpoint.folder="abfs://box/run?sig=x"' | expected abfs://BUCKET/PATH; set the account and the
# hardware
hardware.xla=true hardware.deterministic=true | hardware.xla=true with hardware.deterministic=true: | set one
strategy=tpu | =tpu: there is no TPU: looked for hardware.tpu,
# dataset
dataset.shards=2 | dataset.shards=2 with dataset._target_=scaleflow.dataset.digits.Digits: only tables
dataset.shards=2 dataset=table dataset.data_dir=x dataset.target=y dataset.cache=memory
    | dataset.shards=2 with dataset.cache=memory: every worker would read all rows once, to keep them
# cluster
cluster=ray cluster.address=ray://head:10001 | ray://head:10001: expected HOST:PORT or auto; | ray job submit
cluster=ray cluster.address=127.0.0.1:1 | no Ray cluster answers there; start one with ray start
cluster=ray cluster.min_workers=3 strategy=multi_worker | cluster.min_workers=3 with cluster.workers=null: | fewer
cluster=ray cluster.min_workers=1 strategy=one_device | this strategy runs in one process
cluster=ray cluster.placement=near | cluster.placement=near: expected one of spread, pack
cluster=ray debug.inline=true | debug.inline=true with cluster=ray: Ray can run the process on a machine without
cluster=local +cluster.address=auto | these keys are only for a Ray cluster
cluster=local +cluster.cpus=2 | only Ray and Kubernetes assign cores and GPUs to processes; use hardware.devices
cluster=slurm | SLURM_PROCID, | is not set, so this process is not a task of a Slurm step; start | with srun
cluster=slurm cluster.submit=sbatch | cluster.submit=sbatch: expected print
cluster=tf_config +cluster.submit=print | use cluster=slurm
"""

#: Refused by the command, in a folder with the files below.
BY_THE_COMMAND = """
strategy=miror | strategy=miror | did you mean mirrored? | auto | one_device
strategy=tpu | strategy=tpu | there is no TPU | TPU_NAME | /dev/accel* | strategy=mirrored
hardware=tpu | hardware=tpu | there is no TPU | hardware.tpu=grpc://HOST:8470
strategy=tpu hardware.tpu=grpc://127.0.0.1:1 | hardware.tpu=grpc://127.0.0.1:1 | nothing answers
dataset=csv dataset.target=price | dataset.data_dir | no default | dataset.data_dir=...
dataset=csv dataset.data_dir=plan dataset.target=price
    | dataset.data_dir=plan: there is no such file or folder; did you mean plain?
dataset=tfrecord | dataset.data_dir, dataset.features, dataset.input, dataset.target | no default
model.init_from=nothing.keras | model.init_from=nothing.keras | no such file | models:/NAME@ALIAS
model=resent | model=resent | did you mean resnet
debug=nan hardware.deterministic=true | debug.nan=true | hardware.deterministic=true | set one of the two to false
checkpoint=none checkpoint.keep=3 | checkpoint.keep
resume=abc | resume=abc | the folder of a run | the id of a run
experiment=digits_miror | experiment=digits_miror | did you mean digits_mirrored?
training=dafault | training=dafault | did you mean default?
strategy= | auto | mirrored | one_device
strategy=null | strategy=null | auto | mirrored | one_device
strategy=3 | strategy=3 | auto | mirrored | one_device
training.epoch=3 | did you mean training.epochs=
model.unit=3 | did you mean model.units=3?
model=cnn model.filter=3 | model.filter: | did you mean model.filters=3?
foo=1 | there is no such key
epochs=3 | there is no such key | did you mean training.epochs=
data_dir=x | dataset.data_dir is a key of dataset=cifar10, | table
evaluation=none evaluation.metrics=[a] | evaluation.metrics: there is no such key; | a key of evaluation=default
dataset=table data_dir=x | data_dir: | did you mean dataset.data_dir=x?
+foo=1 | there is no such key
stratgy=mirrored | did you mean strategy=mirrored?
+stratgy=mirrored | did you mean strategy?
training.epochs=abc | training.epochs=abc | an integer, at least 1
training.epochs= | an integer, at least 1
tracking.uri=runs | tracking.uri=runs | sqlite:///mlflow.db
'tracking.uri='"'"'http://[::1'"'"'' | tracking.uri=http://[::1
hydra.run.dir=plain/x | hydra.run.dir=plain/x | choose a folder
hydra.run.dir=plain | hydra.run.dir=plain | choose a folder
'training.epochs=[1' | training.epochs=[1 | a bracket is missing; type 'training.epochs=[1]'
'training.epochs=${' | training.epochs=${
training | training | KEY=VALUE
training.epochs=1,2 | training.epochs=1,2 | -m
strategy=auto,mirrored | strategy=auto,mirrored | -m
'training.epochs=${nowhere}' | training.epochs | nowhere
'tracking.run_name=${oc.env:NOWHERE}' | tracking.run_name | NOWHERE
'tracking.run_name=${oc.env:NOWHERE' | tracking.run_name
'tracking.run_name='"'"'${nowhere:1}'"'"'' | tracking.run_name | nowhere
'tracking.run_name=???' | tracking.run_name
--config-dir nowhere | --config-dir nowhere | there is no such folder
--config-dir plain | --config-dir plain | there is no such folder
training.epochs=1 --config-dir conf model=mien | model=mien | did you mean mine?
training.epochs 3 | training.epochs | KEY=VALUE in one word
evalute abc | evalute: there is no such command; did you mean evaluate? (init, schema, doctor, check, find,
--config-dir conf evaluate abc | evaluate: a command is the first word; write scaleflow evaluate
training.early_stopping.patience=2 | type 'training.early_stopping={patience: 2}'
training.epochs=1 strategy=mirrored,one_device | strategy=mirrored,one_device | several values need -m
-m model=mlp,cnn training.epoch=1 | training.epoch: | did you mean training.epochs=
-m model=mlp,cnn 'model.filters=[4]' | model.filters: | no such key
--config-dir | --config-dir
--config-name=nowhere | nowhere
--frobnicate | --frobnicate
--cfg jub | jub | job
--cfg job strategy=miror | strategy=miror | did you mean mirrored?
--cfg job training.epoch=3 | training.epoch | did you mean training.epochs=
-m strategy=mirrored,miror | strategy=miror | did you mean mirrored?
-m cluster=local,flink | cluster=flink | there is no such option | kubernetes
optimizer.over=time training.max_seconds=10m | a schedule follows the updates | set training.max_steps
optimizer.learning_rate=auto training.engine=fit | training.engine=fit with optimizer.learning_rate=auto
optimizer.learning_rate=auto debug.inline=true | debug.inline | set a number
optimizer.learning_rate=auto strategy=parameter_server cluster.workers=2 | use another strategy
-m seed=1 optimizer.learning_rate=auto | each job of a sweep would find its own
sweep.max_seconds=10m | applies only to the jobs of a sweep
-m seed=1 sweep.max_seconds=soon | this is no time; write 600 for seconds, or 10m
-m seed=1,2 hydra.sweeper.timeout=10m | hydra.sweeper.timeout: the sweeper has no such key; type sweep.max_seconds=10m
-m training.epoch=1,2 | training.epoch | did you mean training.epochs=
hydra/launcher=jobless | hydra/launcher=jobless | basic
hydra.run.dirr=x | hydra.run.dirr
--config-dir conf model=mien | model=mien | did you mean mine? | cnn
--config-dir=conf model=mien | model=mien | did you mean mine?
-cd conf model=mien | model=mien | did you mean mine?
--config-dir conf model=aimless | model._target_ | dotted name
--config-dir conf training=typo | training.epoch: | did you mean training.epochs?
--config-dir conf training=text | training.epochs=three | an integer, at least 1
--config-dir conf experiment=key | training.epoch: | did you mean training.epochs?
--config-dir conf experiment=group | trainig: | did you mean training?
--config-dir conf experiment=option | model | cnnn | did you mean cnn?
--config-dir conf dataset=broken | dataset/broken.yaml | line
--config-dir conf model=mine model.unit=3 | model.unit:
# find
find lr strategy=parameter_server | strategy=parameter_server | use another strategy
find lr optimizer.schedule=cosine | optimizer.schedule=cosine | optimizer.schedule=constant
find lr training.engine=fit | training.engine=fit | training.engine=loop
find lr training.batch_size=auto | training.batch_size=auto | scaleflow find batch_size
find lr --low 1 --high 0.1 | --low 1 | --high 0.1 | the lower one first
find lr --steps 3 | --steps 3 | at least 20
find lr resume=x | resume=x | leave it out
find lr model=mpl | model=mpl | did you mean mlp?
find batch_size training.batch_size=4 | training.batch_size=4 | leave it out
find batch_size --high 1 | --high | learning rate
find batch_size profiler=trace | profiler=trace | profiler=none
find batch_size training.global_batch_size=64 | training.batch_size=auto | training.global_batch_size=64
training.batch_size=auto strategy=parameter_server | training.batch_size=auto with
training.batch_size=auto cluster=ray | training.batch_size=auto with
training.batch_size=auto debug=inline | training.batch_size=auto with
training.batch_size=auto debug=fast | training.batch_size=auto with
# cluster
cluster=kubernetes | JOB_COMPLETION_INDEX, SCALEFLOW_PODS, SCALEFLOW_JOB is not set
cluster=slurm cluster.submit=print -m seed=0 | works only in a command that starts one new run
cluster=kubernetes cluster.submit=print | cluster.image=null | cluster.image=REGISTRY/IMAGE
cluster=kubernetes cluster.submit=print cluster.image=team/train checkpoint.max_seconds=60
    | max_seconds=60.0 with cluster=kubernetes: | activeDeadlineSeconds
cluster=kubernetes cluster.submit=print cluster.image=team/train
    | cluster.volume=null with checkpoint=default: | a PersistentVolumeClaim | or use checkpoint=none
cluster=kubernetes cluster.submit=print cluster.image=team/train checkpoint=none
    | tracking.uri=null | set tracking.uri to a server, or cluster.env_from to a Secret
cluster=kubernetes cluster.submit=print cluster.image=team/train checkpoint=none strategy=parameter_server
    | cluster.volume=null with strategy=parameter_server
cluster=kubernetes cluster.submit=print cluster.image=team/train cluster.volume=runs tracking=none cluster.job=Mine
    | such as mine
cluster=kubernetes cluster.submit=print cluster.image=team/train cluster.volume=runs tracking.uri=http://me:x@there
    | this secret would be written into the script
cluster=kubernetes cluster.submit=print cluster.image=team/train cluster.volume=runs cluster.retries=-1
    | cluster.retries=-1: expected an integer, at least 0
+cluster.image=team/train | cluster=local: image, | these keys are only for pods; use cluster=kubernetes
"""

#: Refused by the worker, when it builds the model.
BY_THE_WORKER = """
# Code that a trusted module imports
trusted_modules=[tests.training.steps] 'training.step={_target_: STEPS.tf.identity}'
    | training.step._target_=STEPS.tf.identity: this code is not trusted, since it is defined in tensorflow
# A custom step: of a function
strategy=mirrored 'training.step={_target_: STEPS.of_examples}'
    | returned a loss of shape (8,) and type float32, expected a real scalar
strategy=mirrored 'training.step={_target_: STEPS.counted}'
    | returned a loss of shape () and type int32, expected a real scalar
strategy=mirrored 'training.step={_target_: STEPS.chosen}'
    | returned outputs of shape (8,), but the dataset's classification targets need (8, 10)
'training.step={_target_: STEPS.alone}' | returned a
'training.step={_target_: STEPS.half}' | NoneType), expected (loss, outputs)
'training.step={_target_: STEPS.unweighted}'
    | scaleflow passes 3 positional arguments, and it takes fewer
'training.step={_target_: STEPS.nowhere}' | cannot be loaded
'training.step={_target_: STEPS.smoothed, smoothness: 0.2}'
    | training.step.smoothness=0.2: STEPS.smoothed has no such argument; it accepts smoothing, consistency
'training.step={_target_: STEPS.smoothed, weights: 1}' | training.step.weights=1: scaleflow itself passes
# A custom step: of a class
'training.step={_target_: STEPS.OnlyUpdates}' | its build(model, make_optimizer) is missing or has other parameters
'training.step={_target_: STEPS.UpdatesUnweighted}'
    | its update(model, batch, weights) is missing or has other parameters
strategy=mirrored 'training.step={_target_: STEPS.ReturnsNothing}' | returned a NoneType, expected (loss, outputs)
'training.step={_target_: STEPS.TwoRates, tail_rate: 1}' | training.step.tail_rate=1:
training.accumulate=2 'training.step={_target_: STEPS.TwoRates}'
    | training.accumulate=2 with training.step._target_=STEPS.TwoRates: | write a function (model, batch, weights)
training.clip_norm=1.0 'training.step={_target_: STEPS.TwoRates}'
    | training.clip_norm=1.0 with training.step._target_=STEPS.TwoRates: | write a function (model, batch, weights)
precision=mixed_float16 'training.step={_target_: STEPS.TwoRates}'
    | precision=mixed_float16 with training.step._target_=STEPS.TwoRates: | write a function (model, batch, weights)
hardware.xla=true 'training.step={_target_: STEPS.TwoRates}'
    | hardware.xla=true with training.step._target_=STEPS.TwoRates: | write a function (model, batch, weights)
optimizer.ema=0.9 'training.step={_target_: STEPS.TwoRates}' | optimizer.ema=0.9 with tr
'optimizer.rate_factors={dense: 0.1}' 'training.step={_target_: STEPS.TwoRates}'
    | optimizer.rate_factors with training.step._target_=STEPS.TwoRates: this class applies its own
# Callbacks
'training.callbacks=[{_target_: keras.losses.MeanSquaredError}]'
    | training.callbacks: keras.losses.MeanSquaredError returned a MeanSquaredError, expected a
'training.callbacks=[{_target_: keras.callbacks.ReduceLROnPlateau, factor: 2}]'
    | training.callbacks: keras.callbacks.ReduceLROnPlateau: ReduceLROnPlateau does not support a factor >= 1.0.
# What the data cannot follow
training.steps_per_epoch=6
    | training.steps_per_epoch=6: the training split's 80 examples make 5 steps of 16; use at most 5
'training.early_stopping={monitor: val/auc}'
    | training.early_stopping.monitor=val/auc: there is no such value; the values are train/loss, train/accuracy,
'training.early_stopping={monitor: val/loss}' dataset.validation=0.001
    | training.early_stopping.monitor=val/loss: there is no such value; the values are train/loss, train/accuracy
# Keras's fit
training.engine=fit strategy=one_device training.epochs=2 training.steps_per_loop=7
    | Keras runs only whole calls, and an epoch has 5 steps and the run 10; use 5, or training.engine=loop
training.engine=fit strategy=one_device training.epochs=2 training.max_steps=8 training.steps_per_loop=5
    | Keras runs only whole calls, and an epoch has 5 steps and the run 8; use 1, or training.engine=loop
training.engine=fit precision=mixed_float16 | training.engine=fit with precision=mixed_float16 with strategy=mirrored:
training.engine=fit training.steps_per_loop=3
    | training.steps_per_loop=3 with training.engine=fit with strategy=mirrored:
# Losses and metrics
'objective.metrics=[{_target_: keras.metrics.AUC}, {_target_: keras.metrics.AUC}]'
    | objective.metrics: two values would have the name auc; give a metric another name: {_target_:
'objective.class_weight={10: 2.0}' | objective.class_weight.10: there is no such class; the classes are 0, 1, 2
'objective.metrics=[{_target_: tests.objective.own.MeanMargin}]' 'checkpoint.best={monitor: val/mean_margin}'
    | checkpoint.best.mode=auto with checkpoint.best.monitor=val/mean_margin: scaleflow does not know whether larger
# Patterns of layers
'optimizer.rate_factors={conv: 0.1}' | conv matches no layer with weights; the model has dense, dense_1
'optimizer.rate_factors={dense: 0.1}' 'model.freeze=[dense*]' | dense matches only layers that do not tr
# Stages
strategy=pipeline strategy.cuts=[dense_7] | strategy.cuts=[dense_7] | no layer dense_7 | dense_1
strategy=pipeline REMAT.nesting 'hardware.remat=[inner]'
    | hardware.remat=[inner]: inner is a model, which strategy=pipeline divides; use hardware.remat=true, or name
# hardware.remat
'hardware.remat=[block*]'
    | hardware.remat=[block*]: block* matches no layer with weights; the model has dense, dense_1, outputs
model=linear hardware.remat=true | hardware.remat=true: the model linear has no part whose activations need
REMAT.subclassed hardware.remat=true
    | hardware.remat=true: the model mine (Subclassed) is not a graph of layers, so it cannot be divided; name layers
dataset._target_=tests.training.words.Words model=text 'hardware.remat=[words]'
    | looks up rows of a table, which saves no memory
REMAT.drawing 'hardware.remat=[layer]'
    | hardware.remat: layer draws random numbers with TensorFlow (RandomStandardNormal), which are others when it is
REMAT.drawing_in_loop 'hardware.remat=[layer]' | hardware.remat: layer draws random numbers with TensorFlow
REMAT.looping 'hardware.remat=[layer]'
    | hardware.remat: layer changes layer/passes in a loop or a branch, which cannot be run again; use
REMAT.counting 'hardware.remat=[layer]'
    | model: the layer layer has a tf.Variable in its attribute count, which Keras does not track: it would
REMAT.borrowing 'hardware.remat=[layer]'
    | hardware.remat: layer uses the weights first/kernel of another layer, whose gradient would be lost
# XLA
XLA.synchronised strategy=mirrored hardware.xla=true
    | hardware.xla=true: the layer norm is synchronised over 2 replicas
    | use hardware.xla=false, or strategy=one_device
XLA.aggregated strategy=mirrored hardware.xla=true
    | hardware.xla=true: the variable center/mean is aggregated over 2 replicas, inside what XLA compiles; use
XLA.of_text strategy=one_device dataset._target_=XLA.Words dataset.validation=null hardware.xla=true
    | hardware.xla=true: the dataset's inputs are text, which XLA cannot compile; use hardware.xla=false
"""

#: In the tables of the worker.
SHORT = {
    "STEPS.": "tests.training.steps.",
    "REMAT.": "model._target_=tests.strategy.test_remat.",
    "XLA.Words": "tests.training.test_xla.Words",
    "XLA.": "~model.units ~model.dropout ~model.batch_norm model._target_=tests.training.test_xla.",
}

#: Files in the folder of a command: options with mistakes.
OWN_OPTIONS = {
    "model/mine.yaml": "# mine\n_target_: mine.build\n_partial_: true\n",
    "model/aimless.yaml": "# has no target\nunits: 3\n",
    "training/typo.yaml": "# wrong\nepoch: 3\n",
    "training/text.yaml": "# wrong\nepochs: three\n",
    "dataset/broken.yaml": "# broken\n_target_: [\n",
    "experiment/key.yaml": "# @package _global_\ntraining:\n  epoch: 3\n",
    "experiment/group.yaml": "# @package _global_\ntrainig:\n  epochs: 3\n",
    "experiment/option.yaml": "# @package _global_\ndefaults:\n  - override /model: cnnn\n",
}


def read_rows(table: str, short: Mapping[str, str] = {}) -> dict[str, list[str]]:
    """The parts of a message by the words that are typed."""
    for name, text in short.items():
        table = table.replace(name, text)
    lines = [line for line in table.replace("\n    |", " |").splitlines() if line and not line.startswith("#")]
    rows = [line.split(" | ") for line in lines]
    found = {words: parts for words, *parts in rows}
    assert len(found) == len(rows), "two rows have the same words"
    return found


def find_missing(words: str, message: str, parts: Sequence[str]) -> list[str]:
    """Parts that a message lacks. One about a single word begins with its key."""
    first, *others = shlex.split(words)
    key = first.lstrip("+").partition("=")[0]
    begins = [] if others or message.startswith((key, key.partition(".")[0] + ":")) else [key]
    return [*begins, *(part for part in parts if part not in message)]


@pytest.fixture(autouse=True)
def no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


PLANNED = read_rows(BY_THE_CONFIG)


@pytest.mark.parametrize("words", PLANNED)
def test_words_are_refused_by_the_config(plan: Callable[..., Plan], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(*shlex.split(words))
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    assert not find_missing(words, message, PLANNED[words]), message


def write_options(folder: Path) -> None:
    """A `conf` with mistakes, and a plain file."""
    for name, text in OWN_OPTIONS.items():
        path = folder / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "plain").write_text("")


TYPED = read_rows(BY_THE_COMMAND)


@pytest.mark.parametrize("words", TYPED)
def test_words_are_refused_by_the_command(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line or two, before anything is started, and leaving nothing behind."""
    write_options(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scaleflow"])
    monkeypatch.setattr(launch, "supervise_run", lambda *arguments, **named: pytest.fail("started"))
    code = run_command(shlex.split(words))
    shown = capsys.readouterr()
    assert code == 2, shown
    assert shown.out in ("", f"scaleflow {__version__}\n")  # the first line comes before the rules are checked
    message = shown.err[shown.err.index("error:") :] if shown.err.startswith("usage:") else shown.err
    assert message.startswith("scaleflow: ") or shown.err.startswith("usage: scaleflow ")
    assert len(message.splitlines()) <= 2
    assert "Traceback" not in message
    assert not [part for part in TYPED[words] if part not in message], message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "plain"]


def run_command(words: Sequence[str]) -> int:
    from scaleflow import cli
    from scaleflow.features.search import find

    is_find = words[0] == "find"
    assert is_find or find_command(words) is None
    code: int = find.main(words[1:]) if is_find else cli.main(words)
    return code


BUILT = read_rows(BY_THE_WORKER, SHORT)

#: Five steps of 16 in an epoch, on two devices.
COMMON = ("hardware=cpu", "hardware.logical_devices=2", "tracking=none", "dataset.limit=100", "dataset.validation=0.2")
SIZE = "training.global_batch_size=16"


def refuse_each(plans: Sequence[Plan]) -> list[str]:
    """In a child: why each plan cannot be built."""
    return run_apart(refuse, ((plan,) for plan in plans))


def refuse(plan: Any) -> str:
    from scaleflow.worker.build import build_training

    try:
        build_training(plan, ignore)
    except ConfigError as refusal:
        return str(refusal)
    return "it was built"


def test_words_are_refused_by_the_worker(isolated: Callable[..., Any], plan: Callable[..., Plan]) -> None:
    """All in one process: TensorFlow starts once."""
    messages = isolated(refuse_each, [plan(*COMMON, SIZE, *shlex.split(words)) for words in BUILT])
    wrong = [
        f"{words}: {message}"
        for (words, parts), message in zip(BUILT.items(), messages, strict=True)
        if len(message.splitlines()) != 1 or not all(part in message for part in parts)
    ]
    assert not wrong, "\n".join(wrong)
