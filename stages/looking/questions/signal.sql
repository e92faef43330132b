-- When and why the signal died: by step, the share of groups whose attempts differ, and what the others were.
with attempts as (
    select step, group_id, coalesce(success::double, reward) as metric, status
    from trajectories
    where is_last_step
), of_group as (
    select step, group_id, count(metric) as known, min(metric) as least, max(metric) as most,
        max(metric) - min(metric) > 1e-6 * max(abs(metric)) as has_spread
    from attempts
    group by all
), of_step as (
    select step, count(*) as groups, avg(has_spread::double) as with_signal,
        avg((not has_spread and most > 0)::double) as all_right,
        avg((not has_spread and most <= 0)::double) as all_wrong
    from of_group
    where known > 1
    group by step
), numbers as (
    select step,
        last(value order by time) filter (name = 'policy/policy_entropy') as entropy,
        last(value order by time) filter (name = 'policy/ppo_kl') as kl
    from metrics
    group by step
), ends as (
    select step, avg(metric) as metric, avg((status = 'truncated')::double) as truncated
    from attempts
    group by step
)
select of_step.step, groups, with_signal, all_right, all_wrong, metric as success, truncated, entropy, kl,
    case
        when with_signal >= 0.25 then 'has signal'
        when all_right > all_wrong then 'too easy'
        else 'too hard'
    end as reading
from of_step
left join numbers on of_step.step is not distinct from numbers.step
left join ends on of_step.step is not distinct from ends.step
order by of_step.step
