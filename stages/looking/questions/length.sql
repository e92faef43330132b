-- How long attempts are: sampled tokens and turns by step, of successes and of others, and how many were cut off.
select step, count(*) as attempts, avg(tokens) as tokens, median(tokens) as median, quantile_cont(tokens, 0.95) as p95,
    max(tokens) as longest, avg(tokens) filter (success) as if_right, avg(tokens) filter (not success) as if_wrong,
    avg(turns) as turns, avg(truncated::double) as truncated
from (
    select step, trajectory_id, sum(completion_tokens) as tokens, sum(len(turns)) as turns,
        bool_or(success) as success, bool_or(status = 'truncated') as truncated
    from trajectories
    group by step, trajectory_id
)
group by step
order by step
