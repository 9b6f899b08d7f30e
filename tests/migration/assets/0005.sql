BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0005');
CREATE TABLE api_keys (
	id INTEGER NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	key_hash VARCHAR(128) NOT NULL, 
	scopes VARCHAR(200) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	last_used_at DOUBLE, 
	revoked_at DOUBLE, prefix VARCHAR(20) DEFAULT '' NOT NULL, expires_at DOUBLE, job_limit INTEGER, 
	CONSTRAINT pk_api_keys PRIMARY KEY (id), 
	CONSTRAINT uq_api_keys_key_hash UNIQUE (key_hash)
);
INSERT INTO "api_keys" VALUES(1,'ci','5000eddc7e369ce539b65186d65220d3d4b16aad99077f46d515bff85f07c9b7','tune',1.79541567049800300601e+09,NULL,NULL,'gsk_QsFo36',2.11163967049800300589e+09,50);
INSERT INTO "api_keys" VALUES(2,'me','fd1abe16265937f944ac5b63792a1d5b9606483d74edff618f6d84c7498450fc','admin',1.7954156705089867115e+09,NULL,1.79541567051401591307e+09,'gsk_SCQeFS',NULL,NULL);
CREATE TABLE audit (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at DOUBLE NOT NULL, 
	actor VARCHAR(200) NOT NULL, 
	action VARCHAR(40) NOT NULL, 
	subject VARCHAR(300) NOT NULL, 
	detail JSON NOT NULL
);
INSERT INTO "audit" VALUES(1,1.79541567037698173523e+09,'local','promoted','256×4096×4096 bf16 tn on nvidia-h200-132sm','{"revision":1,"replaced":null,"job":"job-1"}');
INSERT INTO "audit" VALUES(2,1.79541567040200686451e+09,'local','promoted','256×4096×4096 bf16 tn on nvidia-h200-132sm','{"revision":2,"replaced":1,"job":"job-1"}');
INSERT INTO "audit" VALUES(3,1.79541567041198468204e+09,'local','promoted','2×13×127×1000 fp16 nt on nvidia-h200-132sm','{"revision":1,"replaced":null,"job":"job-1"}');
INSERT INTO "audit" VALUES(4,1.79541567043198060991e+09,'local','pinned','256×4096×4096 bf16 tn on nvidia-h200-132sm','{"revision":1,"replaced":2}');
INSERT INTO "audit" VALUES(5,1.79541567049900889401e+09,'local','key-created','ci','{"prefix":"gsk_QsFo36","scope":"tune"}');
INSERT INTO "audit" VALUES(6,1.79541567050999259945e+09,'local','key-created','me','{"prefix":"gsk_SCQeFS","scope":"admin"}');
INSERT INTO "audit" VALUES(7,1.7954156705149815083e+09,'local','key-revoked','me','{"prefix":"gsk_SCQeFS"}');
CREATE TABLE devices (
	id INTEGER NOT NULL, 
	slug VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	arch VARCHAR(20) NOT NULL, 
	sm_count INTEGER NOT NULL, 
	memory_bytes BIGINT NOT NULL, 
	l2_bytes BIGINT NOT NULL, 
	max_clock_mhz INTEGER NOT NULL, 
	memory_bandwidth BIGINT NOT NULL, 
	CONSTRAINT pk_devices PRIMARY KEY (id), 
	CONSTRAINT uq_devices_slug UNIQUE (slug)
);
INSERT INTO "devices" VALUES(1,'nvidia-h200-132sm','NVIDIA H200','sm90',132,150000000000,62914560,1980,4800000000000);
CREATE TABLE environments (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	description JSON NOT NULL, 
	CONSTRAINT pk_environments PRIMARY KEY (id), 
	CONSTRAINT uq_environments_digest UNIQUE (digest)
);
INSERT INTO "environments" VALUES(1,'e960ee6c5879a2e2','{"gpu_uuid":"GPU-1","driver":"580.1","cuda":"13.0","cutlass":"4.2.0","compiler":"V13.0.88","torch":"2.13.0","cublas":"13.0","gemmsmith":"0.1.0"}');
CREATE TABLE gpus (
	uuid VARCHAR(80) NOT NULL, 
	device_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	seen_at DOUBLE NOT NULL, 
	CONSTRAINT pk_gpus PRIMARY KEY (uuid), 
	CONSTRAINT fk_gpus_device_id FOREIGN KEY(device_id) REFERENCES devices (id), 
	CONSTRAINT fk_gpus_environment_id FOREIGN KEY(environment_id) REFERENCES environments (id)
);
INSERT INTO "gpus" VALUES('GPU-1',1,1,1.79541567052600526807e+09);
CREATE TABLE idempotency_keys (
	"key" VARCHAR(255) NOT NULL, 
	job_id INTEGER NOT NULL, 
	created_at DOUBLE NOT NULL, 
	CONSTRAINT pk_idempotency_keys PRIMARY KEY ("key"), 
	CONSTRAINT fk_idempotency_keys_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "idempotency_keys" VALUES('key-1',1,1.79541567044300436973e+09);
CREATE TABLE job_events (
	job_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	kind VARCHAR(40) NOT NULL, 
	data JSON NOT NULL, 
	CONSTRAINT pk_job_events PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_job_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_events" VALUES(1,1,1.79541567044199848173e+09,'created','{"problem":"256×4096×4096 bf16 tn","effort":"quick","device":""}');
INSERT INTO "job_events" VALUES(1,2,1.79541567046400594716e+09,'started','{"attempt":1,"owner":"worker-1"}');
INSERT INTO "job_events" VALUES(1,3,1.7954156704809844494e+09,'progress','{"phase":"screen","done":3,"total":12,"best_us":11.5,"best":"kernel_1@x","message":""}');
INSERT INTO "job_events" VALUES(1,4,1.79541567048701953884e+09,'finished','{"winner_revision":2,"best_us":11.5,"best":"kernel_1@x"}');
INSERT INTO "job_events" VALUES(2,1,1.79541567049498558038e+09,'created','{"problem":"2×13×127×1000 fp16 nt","effort":"default","device":"nvidia-h200-132sm"}');
CREATE TABLE jobs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	public_id VARCHAR(40) NOT NULL, 
	problem_id INTEGER NOT NULL, 
	effort VARCHAR(20) NOT NULL, 
	device VARCHAR(200) NOT NULL, 
	priority INTEGER NOT NULL, 
	active_key VARCHAR(300), 
	state VARCHAR(20) NOT NULL, 
	phase VARCHAR(40) NOT NULL, 
	done INTEGER NOT NULL, 
	total INTEGER NOT NULL, 
	best_us DOUBLE, 
	best TEXT, 
	error TEXT, 
	winner_revision INTEGER, 
	cancel_requested BOOLEAN NOT NULL, 
	owner VARCHAR(200), 
	attempt INTEGER NOT NULL, 
	handed_back INTEGER NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	lease_expires_at DOUBLE, 
	available_at DOUBLE NOT NULL, 
	created_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	finished_at DOUBLE, 
	last_event INTEGER NOT NULL, calls BIGINT DEFAULT 0 NOT NULL, saving_us DOUBLE DEFAULT 0 NOT NULL, ordered_by VARCHAR(200), deadline_at DOUBLE, 
	CONSTRAINT fk_jobs_problem_id FOREIGN KEY(problem_id) REFERENCES problems (id), 
	CONSTRAINT uq_jobs_active_key UNIQUE (active_key), 
	CONSTRAINT uq_jobs_public_id UNIQUE (public_id)
);
INSERT INTO "jobs" VALUES(1,'75f00d95033c4193bfde2fe7f5607b8e',1,'quick','',0,NULL,'done','screen',3,12,11.5,'kernel_1@x',NULL,2,0,'worker-1',1,0,3,NULL,1.79541567043801546092e+09,1.79541567043801546092e+09,1.79541567045998287201e+09,1.79541567048701953884e+09,4,0,0.0,NULL,NULL);
INSERT INTO "jobs" VALUES(2,'d72679d7cd8941d38f13ffd6af0d388f',2,'default','nvidia-h200-132sm',3,'2/default/nvidia-h200-132sm','waiting','',0,0,NULL,NULL,NULL,NULL,0,NULL,0,0,3,NULL,1795415670.49402,1795415670.49402,NULL,NULL,1,96,1.5,'ci',1.17954156704940204625e+10);
CREATE TABLE kernels (
	id INTEGER NOT NULL, 
	name VARCHAR(300) NOT NULL, 
	description JSON NOT NULL, 
	CONSTRAINT pk_kernels PRIMARY KEY (id), 
	CONSTRAINT uq_kernels_name UNIQUE (name)
);
INSERT INTO "kernels" VALUES(1,'kernel_1','{"backend":"cutlass3x","name":"kernel_1","arch":"sm90","dtype":"bf16","layout":"tn","alignment_a":8,"alignment_b":8,"alignment_d":8,"tile":[64,64,64],"cluster":[1,1],"stages":0,"mainloop":"warpspecialized_pingpong","epilogue":"tma","scheduler":"persistent","swapped":false,"fast_accumulation":false}');
INSERT INTO "kernels" VALUES(2,'kernel_2','{"backend":"cutlass3x","name":"kernel_2","arch":"sm90","dtype":"bf16","layout":"tn","alignment_a":8,"alignment_b":8,"alignment_d":8,"tile":[64,64,64],"cluster":[1,1],"stages":0,"mainloop":"warpspecialized_pingpong","epilogue":"tma","scheduler":"persistent","swapped":false,"fast_accumulation":false}');
INSERT INTO "kernels" VALUES(3,'kernel_3','{"backend":"cutlass3x","name":"kernel_3","arch":"sm90","dtype":"bf16","layout":"tn","alignment_a":8,"alignment_b":8,"alignment_d":8,"tile":[64,64,64],"cluster":[1,1],"stages":0,"mainloop":"warpspecialized_pingpong","epilogue":"tma","scheduler":"persistent","swapped":false,"fast_accumulation":false}');
INSERT INTO "kernels" VALUES(4,'kernel_0','{"backend":"cutlass3x","name":"kernel_0","arch":"sm90","dtype":"bf16","layout":"tn","alignment_a":8,"alignment_b":8,"alignment_d":8,"tile":[64,64,64],"cluster":[1,1],"stages":0,"mainloop":"warpspecialized_pingpong","epilogue":"tma","scheduler":"persistent","swapped":false,"fast_accumulation":false}');
CREATE TABLE pack_kernels (
	pack_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	kernel_id INTEGER NOT NULL, 
	CONSTRAINT pk_pack_kernels PRIMARY KEY (pack_id, position), 
	CONSTRAINT fk_pack_kernels_kernel_id FOREIGN KEY(kernel_id) REFERENCES kernels (id), 
	CONSTRAINT fk_pack_kernels_pack_id FOREIGN KEY(pack_id) REFERENCES packs (id) ON DELETE CASCADE
);
INSERT INTO "pack_kernels" VALUES(1,0,1);
CREATE TABLE packs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	hash VARCHAR(128) NOT NULL, 
	toolchain VARCHAR(128) NOT NULL, 
	bytes BIGINT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	CONSTRAINT uq_packs_hash UNIQUE (hash)
);
INSERT INTO "packs" VALUES(1,'c0ffee','toolchain',123456,1.7954156703420190811e+09);
CREATE TABLE "problems" (
	id INTEGER NOT NULL, 
	dtype VARCHAR(120) NOT NULL, 
	layout VARCHAR(4) NOT NULL, 
	batch INTEGER NOT NULL, 
	m INTEGER NOT NULL, 
	n INTEGER NOT NULL, 
	k INTEGER NOT NULL, 
	lg_m DOUBLE NOT NULL, 
	lg_n DOUBLE NOT NULL, 
	lg_k DOUBLE NOT NULL, 
	operation VARCHAR(120) NOT NULL, 
	CONSTRAINT pk_problems PRIMARY KEY (id), 
	CONSTRAINT uq_problems_identity UNIQUE (operation, batch, m, n, k)
);
INSERT INTO "problems" VALUES(1,'bf16','tn',1,256,4096,4096,8.0,12.0,12.0,'bf16.tn');
INSERT INTO "problems" VALUES(2,'fp16','nt',2,13,127,1000,3.70043971814109218243e+00,6.98868468677216547746e+00,9.96578428466208698921e+00,'fp16.nt');
CREATE TABLE trials (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	created_at DOUBLE NOT NULL, 
	problem_id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	kernel_id INTEGER NOT NULL, 
	launch_key VARCHAR(100) NOT NULL, 
	launch JSON NOT NULL, 
	phase VARCHAR(20) NOT NULL, 
	job VARCHAR(100) NOT NULL, 
	median_us DOUBLE, 
	ci_low_us DOUBLE, 
	ci_high_us DOUBLE, 
	samples INTEGER, 
	samples_us JSON NOT NULL, 
	failure_kind VARCHAR(20), 
	failure_message TEXT, 
	correctness JSON, 
	conditions JSON, 
	workspace_bytes BIGINT NOT NULL, 
	cost_s DOUBLE NOT NULL, 
	replayed BOOLEAN NOT NULL, 
	CONSTRAINT fk_trials_device_id FOREIGN KEY(device_id) REFERENCES devices (id), 
	CONSTRAINT fk_trials_environment_id FOREIGN KEY(environment_id) REFERENCES environments (id), 
	CONSTRAINT fk_trials_kernel_id FOREIGN KEY(kernel_id) REFERENCES kernels (id), 
	CONSTRAINT fk_trials_problem_id FOREIGN KEY(problem_id) REFERENCES problems (id), 
	CONSTRAINT uq_trials_identity UNIQUE (problem_id, device_id, kernel_id, launch_key, phase, environment_id, job)
);
INSERT INTO "trials" VALUES(1,1.79541567032198309903e+09,1,1,1,1,'along_m.s4.split_k.x2.sm0','{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','screen','job-1',11.0,10.0,12.0,3,'[10.0,11.0,12.0]',NULL,NULL,'{"error":0.001,"max_error":0.002,"tolerance":0.01,"repeatable":true}','{"sm_clock_mhz":1755.0,"power_w":640.5,"temperature_c":55.0,"throttle":["sw_power_cap"]}',4096,0.25,0);
INSERT INTO "trials" VALUES(2,1.79541567032298898702e+09,2,1,1,2,'along_m.s4.split_k.x2.sm0','{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','screen','',12.0,11.0,13.0,3,'[11.0,12.0,13.0]',NULL,NULL,'{"error":0.001,"max_error":0.002,"tolerance":0.01,"repeatable":true}','{"sm_clock_mhz":1755.0,"power_w":640.5,"temperature_c":55.0,"throttle":["sw_power_cap"]}',4096,0.25,0);
INSERT INTO "trials" VALUES(3,1.79541567032298898702e+09,1,1,1,3,'along_m.s4.split_k.x2.sm0','{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','screen','',NULL,NULL,NULL,NULL,'[]','non_finite','NaN at D[0, 3]','{"error":"inf","max_error":"inf","tolerance":0.01,"repeatable":false}',NULL,4096,0.25,0);
CREATE TABLE winners (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	problem_id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	kernel_id INTEGER, 
	revision INTEGER NOT NULL, 
	sequence BIGINT NOT NULL, 
	is_current BOOLEAN NOT NULL, 
	pinned BOOLEAN NOT NULL, 
	origin VARCHAR(20) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	use VARCHAR(20) NOT NULL, 
	median_us DOUBLE, 
	speedup DOUBLE, 
	launch JSON, 
	record JSON NOT NULL, 
	replayed BOOLEAN NOT NULL, 
	pack VARCHAR(128), 
	promoted_at VARCHAR(40) NOT NULL, 
	job VARCHAR(100), signature JSON, 
	CONSTRAINT fk_winners_device_id FOREIGN KEY(device_id) REFERENCES devices (id), 
	CONSTRAINT fk_winners_environment_id FOREIGN KEY(environment_id) REFERENCES environments (id), 
	CONSTRAINT fk_winners_kernel_id FOREIGN KEY(kernel_id) REFERENCES kernels (id), 
	CONSTRAINT fk_winners_problem_id FOREIGN KEY(problem_id) REFERENCES problems (id), 
	CONSTRAINT uq_winners_revision UNIQUE (problem_id, device_id, revision)
);
INSERT INTO "winners" VALUES(1,1,1,1,4,1,4,1,1,'measured','1f42484e4bf217facabb2e08a2177ecb','cutlass',12.0,1.0,'{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','{"statistics":{"median_us":12.0,"ci_low_us":12.0,"ci_high_us":12.0,"samples":25},"baseline":{"median_us":12.0,"ci_low_us":11.5,"ci_high_us":12.5,"samples":25},"speedup":{"median":1.0,"ci_low":1.01,"ci_high":1.4},"correctness":{"error":0.001,"max_error":0.002,"tolerance":0.01,"repeatable":true},"conditions":{"sm_clock_mhz":1755.0,"power_w":640.5,"temperature_c":55.0,"throttle":["sw_power_cap"]},"ties":["kernel_7@heuristic.s1.data_parallel.x1.sm0"],"baseline_kernels":[],"power_penalty":null,"regimes":[],"device":{"name":"NVIDIA H200","arch":"sm90","sm_count":132,"memory_bytes":150000000000,"l2_bytes":62914560,"max_clock_mhz":1980,"memory_bandwidth":4800000000000}}',0,NULL,'2026-11-20T10:00:00.000+00:00','job-1',NULL);
INSERT INTO "winners" VALUES(2,1,1,1,4,2,2,0,0,'measured','86109bb5b09707d67291bc1fc4bebd5c','cutlass',11.0,1.09090909090909082834e+00,'{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','{"statistics":{"median_us":11.0,"ci_low_us":11.0,"ci_high_us":11.0,"samples":25},"baseline":{"median_us":12.0,"ci_low_us":11.5,"ci_high_us":12.5,"samples":25},"speedup":{"median":1.0909090909090908,"ci_low":1.01,"ci_high":1.4},"correctness":{"error":0.001,"max_error":0.002,"tolerance":0.01,"repeatable":true},"conditions":{"sm_clock_mhz":1755.0,"power_w":640.5,"temperature_c":55.0,"throttle":["sw_power_cap"]},"ties":["kernel_7@heuristic.s1.data_parallel.x1.sm0"],"baseline_kernels":[],"power_penalty":null,"regimes":[],"device":{"name":"NVIDIA H200","arch":"sm90","sm_count":132,"memory_bytes":150000000000,"l2_bytes":62914560,"max_clock_mhz":1980,"memory_bandwidth":4800000000000}}',0,'c0ffee','2026-11-20T11:00:00.000+00:00','job-1','{"key":"0123456789abcdef","value":"c2lnbmVk","pack":"c0ffee"}');
INSERT INTO "winners" VALUES(3,2,1,1,4,1,3,1,0,'replayed','9fce6b13188bca0b389dedd7dfc260bb','cutlass',9.0,1.33333333333333325931e+00,'{"raster":"along_m","swizzle":4,"decomposition":"split_k","splits":2,"sm_budget":0}','{"statistics":{"median_us":9.0,"ci_low_us":9.0,"ci_high_us":9.0,"samples":25},"baseline":{"median_us":12.0,"ci_low_us":11.5,"ci_high_us":12.5,"samples":25},"speedup":{"median":1.3333333333333333,"ci_low":1.01,"ci_high":1.4},"correctness":{"error":0.001,"max_error":0.002,"tolerance":0.01,"repeatable":true},"conditions":{"sm_clock_mhz":1755.0,"power_w":640.5,"temperature_c":55.0,"throttle":["sw_power_cap"]},"ties":["kernel_7@heuristic.s1.data_parallel.x1.sm0"],"baseline_kernels":[],"power_penalty":null,"regimes":[],"device":{"name":"NVIDIA H200","arch":"sm90","sm_count":132,"memory_bytes":150000000000,"l2_bytes":62914560,"max_clock_mhz":1980,"memory_bandwidth":4800000000000}}',1,NULL,'2026-11-20T12:00:00.000+00:00','job-1',NULL);
CREATE INDEX ix_jobs_lease ON jobs (state, priority, id);
CREATE INDEX ix_pack_kernels_kernel_id ON pack_kernels (kernel_id);
CREATE INDEX ix_trials_job ON trials (job, id);
CREATE INDEX ix_winners_device_id ON winners (device_id);
CREATE INDEX ix_winners_sequence ON winners (sequence);
CREATE UNIQUE INDEX uq_winners_current ON winners (problem_id, device_id) WHERE is_current;
CREATE INDEX ix_idempotency_keys_job_id ON idempotency_keys (job_id);
CREATE INDEX ix_jobs_ordered_by ON jobs (ordered_by, state);
CREATE INDEX ix_winners_gain ON winners (device_id, speedup) WHERE is_current;
CREATE INDEX ix_problems_near ON problems (operation, batch, lg_m);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('trials',3);
INSERT INTO "sqlite_sequence" VALUES('packs',1);
INSERT INTO "sqlite_sequence" VALUES('winners',3);
INSERT INTO "sqlite_sequence" VALUES('audit',7);
INSERT INTO "sqlite_sequence" VALUES('jobs',2);
COMMIT;
