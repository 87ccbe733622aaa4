(* The claims on one coordinate, AdamW, noise and cost, applied where all their hypotheses hold. *)
From Coq Require Import Reals Lra Psatz Lia.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum Formulas Vectors Quadratic MomentumStability AdamWIdle Pulse MomentumDecay
  UncoupledLimit NoiseFloor Weyl Statements.
Open Scope R_scope.

Example claim_two_blocks_met : forall z, is_root (two_block_trace (9 / 10) (3 / 2)) ((1 - 3 / 2) ^ 2) z -> Cmod z < 1.
Proof. apply claim_two_blocks; lra. Qed.

Example claim_two_blocks_full_met : ~ (Rabs (1 - 3 / 2 * (1 + 9 / 10)) < 1 /\ Rabs (1 - 3 / 2 * (1 - 9 / 10)) < 1).
Proof. rewrite (claim_two_blocks_full (9 / 10) (3 / 2)) by lra. lra. Qed.

(* p = 1, lam = 1, eta = 1, beta = 1/2: x and m both from the plain EMA recursion *)
Fixpoint ema (t : nat) : R * R :=
  match t with
  | O => (1, 0)
  | S k => let (x, m) := ema k in let m' := 1 / 2 * m + (1 - 1 / 2) * (1 * x) in (x - 1 * m', m')
  end.

Lemma ema_visited : visited_block (fun t => fst (ema t)) (fun t => snd (ema t)) 1 (1 / 2) 1 1.
Proof.
  split; [|split].
  - intros k. rewrite Nat.mul_1_r. simpl. destruct (ema k). reflexivity.
  - intros k i Hi. lia.
  - intros t. simpl. destruct (ema t). reflexivity.
Qed.

Example claim_cycle_is_ema_met k : fst (ema (S k * 1)) = fst (ema (k * 1))
  - 1 * cycle_momentum (fun t => snd (ema t)) (1 / 2) 1 k.
Proof. apply (claim_cycle_is_ema _ _ 1 (1 / 2) 1 1 ltac:(lia) ltac:(lra) ema_visited k). Qed.

Example claim_uncoupled_limit_met :
  forall z, is_root (momentum_trace ((9 / 10) ^ 2) 19 1) ((9 / 10) ^ 2) z -> Cmod z < 1.
Proof. apply (claim_uncoupled_limit (9 / 10) 19 1 2); [lra|lia|]. unfold uncoupled_edge. lra. Qed.

Definition pulse_m (t : nat) : R := match t with O => 0 | S k => (1 - 1 / 2) * (1 / 2) ^ k * 1 end.
Definition pulse_x (t : nat) : R := 1 - 1 * 1 * (1 - (1 / 2) ^ t).
Lemma pulse_holds : pulse pulse_x pulse_m 1 (1 / 2) 1.
Proof. repeat split; intros; unfold pulse_x, pulse_m; simpl; field. Qed.

Example claim_pulse_met : pulse_x 3 = pulse_position (pulse_x 0) 1 (1 / 2) 1 3.
Proof. apply (claim_pulse pulse_x pulse_m 1 (1 / 2) 1 pulse_holds 3). Qed.

Example claim_pulse_total_met : is_lim_seq pulse_x (pulse_x 0 - 1 * 1).
Proof. apply (claim_pulse_total pulse_x pulse_m 1 (1 / 2) 1); [lra|apply pulse_holds]. Qed.

(* AdamW with torch's defaults, m and v after one gradient 1, decay 1/100 *)
Fixpoint adamw (t : nat) : R * (R * R) :=
  match t with
  | O => (1, (1 / 10, 1 / 1000))
  | S k => let (x, mv) := adamw k in let m' := 9 / 10 * fst mv in let v' := 999 / 1000 * snd mv in
      ((1 - 1 / 10 * (1 / 100)) * x - 1 / 10 * (m' / (1 - (9 / 10) ^ (1 + S k))
         / (sqrt (v' / (1 - (999 / 1000) ^ (1 + S k))) + 1 / 100)), (m', v'))
  end.

Lemma adamw_holds : adamw_idle (fun t => fst (adamw t)) (fun t => fst (snd (adamw t))) (fun t => snd (snd (adamw t)))
  (1 / 10) (1 / 100) (9 / 10) (999 / 1000) (1 / 100) 1.
Proof. intros k. cbn [adamw]. destruct (adamw k) as [x [m v]]. repeat split. Qed.

Example claim_adamw_idle_met k : fst (adamw k) = (1 - 1 / 10 * (1 / 100)) ^ k * 1
  - 1 / 10 * psum (fun i => (1 - 1 / 10 * (1 / 100)) ^ (k - S i)
    * adamw_idle_step (1 / 10) (1 / 1000) (9 / 10) (999 / 1000) (1 / 100) 1 (S i)) k.
Proof. exact (claim_adamw_idle _ _ _ _ _ _ _ _ _ k adamw_holds). Qed.

Lemma sqrt_quarter : sqrt (1 / 4) = 1 / 2.
Proof. replace (1 / 4) with ((1 / 2) ^ 2) by field. apply sqrt_pow2. lra. Qed.

Example claim_adamw_drift_met :
  psum (fun k => (1 / 4) ^ k * (4 / 5) / sqrt ((1 / 4) ^ k * (4 / 5))) 2 = adamw_drift_per_cycle (1 / 4) (1 / 4) 2.
Proof. apply claim_adamw_drift; try lra; try lia. rewrite sqrt_quarter. lra. Qed.

Example claim_drift_limit_met :
  filterlim (fun beta2 => adamw_drift_per_cycle (9 / 10) beta2 4) (at_left 1) (locally (sqrt (INR 4))).
Proof. apply claim_drift_limit; [lra|lia]. Qed.

(* eta = lam = s2 = 1, beta = 0: x' = - xi, so all moments are 1, -1... *)
Lemma stationary_met : stationary 1 0 1 1 1 (-1) 2.
Proof. unfold stationary. repeat split; lra. Qed.

Example claim_noise_floor_met : 1 = noise_variance 1 0 1 1.
Proof. apply (claim_noise_floor 1 0 1 1 1 (-1) 2); try lra. apply stationary_met. Qed.

Example claim_weyl_met : Rabs (3 - 1) <= 2.
Proof.
  apply (claim_weyl 1 (fun _ _ => 1) (fun _ _ => 2) 1 3 2); [split|split|].
  - intros v. rewrite nrm_sq. unfold dot, mv. simpl. lra.
  - exists (fun _ => 1). rewrite nrm_sq. unfold nrm, dot, mv. simpl. split; [apply sqrt_lt_R0|]; lra.
  - intros v. rewrite nrm_sq. unfold dot, mv. simpl. lra.
  - exists (fun _ => 1). rewrite nrm_sq. unfold nrm, dot, mv. simpl. split; [apply sqrt_lt_R0|]; lra.
  - intros v. rewrite nrm_sq. unfold dot, mv. simpl. rewrite Rabs_pos_eq; nra.
Qed.

Example claim_reach_met : psum (fun j => 1 - INR j / INR 4) 4 / INR 4 = reach_mean 4.
Proof. apply claim_reach. lia. Qed.

Example claim_reach_interleaved_met : psum (fun j => 1 - INR j / INR 12) 4 / INR 4 = reach_interleaved_mean 4 12.
Proof. apply claim_reach_interleaved. lia. Qed.

Example claim_exact_speedup_met : 1 <= exact_layer_speedup 1 1 4 < 2 * 4.
Proof. apply claim_exact_speedup; lra. Qed.

Example claim_angle_limit_met : 0 < angle_coeff 1 1 1 (3 / 4).
Proof. apply claim_angle_limit; [lra|lra|lra|]. unfold angle_step_max. lra. Qed.

Example claim_ema_limit_met : is_lim_seq (fun t => fst (ema t)) 0.
Proof.
  apply (claim_ema_limit 1 (1 / 2) 1 ltac:(lra)) with (m := fun t => snd (ema t)).
  - unfold momentum_edge. lra.
  - intros t. simpl. destruct (ema t). split; reflexivity.
Qed.

Example claim_uncoupled_decays_met : is_lim_seq (fun k => fst (ema (k * 1))) 0.
Proof.
  apply (claim_uncoupled_decays _ _ 1 (1 / 2) 1 1 ltac:(lia) ltac:(lra)) with (2 := ema_visited).
  unfold uncoupled_edge. lra.
Qed.
