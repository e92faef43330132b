-- Which policy made a trajectory (--id and the start of its id), and what that policy was trained on.
select trajectory_id, t.step, env, task_id, sample, policy_version as policy, left(policy_digest, 12) as digest,
    o.step as trained_in_step, settings ->> '$.train.algo' as by, left(p.parent, 12) as parent,
    coalesce(p.source, first_policy.source) as began_as
from trajectories as t
left join policies as p on p.version = t.policy_version
left join policies as first_policy on first_policy.version = 0
left join outputs as o on o.step = t.policy_version - 1 and o.stage = 'train'
where starts_with(trajectory_id, $id) and is_last_step
order by t.step, env, task_id, sample
