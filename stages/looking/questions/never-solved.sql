-- Which tasks never succeed: how often each was tried, how the attempts ended, and one of them to look at.
select env, task_id, count(*) as attempts, min(step) as first_step, max(step) as last_step, avg(reward) as reward,
    max(reward) as best_reward, mode(stop_reason) as ended_mostly_by, avg(completion_tokens) as tokens,
    min_by(trajectory_id, sample) as for_example
from trajectories
where is_last_step
group by env, task_id
having count(success) > 0 and not bool_or(coalesce(success, false))
order by attempts desc, reward, task_id
