-- How each environment goes: success, pass@n, turns, calls, variance per prompt, and groups with signal, with a reading.
with attempts as (
    select env, step, group_id, trajectory_id, reward, success, coalesce(success::double, reward) as metric
    from trajectories
    where is_last_step
), of_group as (
    select env, step, group_id, count(metric) as known, max(metric) > 0 as passed, var_pop(metric) as variance,
        max(metric) - min(metric) > 1e-6 * max(abs(metric)) as has_spread
    from attempts
    group by all
), groups as (
    select env, count(*) as groups, avg(passed::double) as pass_at_n,
        avg(variance) filter (known > 1) as variance_per_prompt, avg(has_spread::double) filter (known > 1) as with_signal
    from of_group
    group by env
), lengths as (
    select env, sum(len(turns)) / count(distinct trajectory_id) as turns from trajectories group by env
), calls as (
    select env, count(*) as calls, count(*) filter (not ok) as failed
    from tool_calls
    where error is distinct from 'no_answer'
    group by env
)
select env, count(*) as attempts, avg(success::double) as success, avg(reward) as reward, any_value(groups) as groups,
    any_value(pass_at_n) as pass_at_n, any_value(turns) as turns, coalesce(any_value(calls), 0) / count(*) as calls,
    any_value(failed) / any_value(calls) as failed_calls, any_value(variance_per_prompt) as variance_per_prompt,
    any_value(with_signal) as with_signal,
    case
        when any_value(with_signal) >= 0.25 then 'has signal'
        when avg(metric) > 0.5 then 'too easy'
        else 'too hard'
    end as reading
from attempts
join groups using (env)
join lengths using (env)
left join calls using (env)
group by env
order by env
