(* The momentum claims, applied where all their hypotheses hold: the coupled 3 x 3 quadratic in three blocks. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum Formulas Vectors Blocks BlockDescent Quadratic FrozenMomentum IdleMomentum IdleLimit
  Statements ExamplesBlocks.
Open Scope R_scope.

Definition x := fun t => fst (irun (1 / 6) (1 / 2) t).
Definition m := fun t => snd (irun (1 / 6) (1 / 2) t).

Example claim_change_of_variable_met t : shadow (1 / 6) (1 / 2) x m (S t)
  = axpy (shadow (1 / 6) (1 / 2) x m t) (- (1 / 6)) (proj id_blk (order 3 t) (W (x t))).
Proof. apply claim_change_of_variable; [lra|]. apply irun_idle. Qed.

Example claim_momentum_descent_met t : let g := proj id_blk (order 3 t) (W (x t)) in
  quad 3 witness (shadow (1 / 6) (1 / 2) x m (S t))
    <= quad 3 witness (shadow (1 / 6) (1 / 2) x m t) - descent_coeff (1 / 6) 1 * nrm 3 g ^ 2
       + 1 / 6 * (1 / 6 * (1 / 2) / (1 - 1 / 2) * frobenius 3 witness) * (nrm 3 (m t) * nrm 3 g).
Proof.
  apply (claim_momentum_descent 3 id_blk (order 3) _ W _ 1 _ (1 / 6) (1 / 2) x m W_smooth); try lra. apply irun_idle.
Qed.

Lemma bracket_met : 0 < idle_bracket 1 (frobenius 3 witness) (1 / 6) (1 / 2).
Proof. unfold idle_bracket. pose proof frobenius_le. lra. Qed.

Example claim_idle_sum_met T : psum (fun t => nrm 3 (proj id_blk (order 3 t) (W (x t))) ^ 2) T
  <= idle_bound (quad 3 witness start) 0 1 (frobenius 3 witness) (1 / 6) (1 / 2).
Proof.
  apply (claim_idle_sum 3 id_blk (order 3) _ W _ 1 _ (1 / 6) (1 / 2) 0 x m T W_smooth); try lra.
  - apply irun_idle.
  - reflexivity.
  - apply W_below.
  - apply bracket_met.
Qed.

Example claim_idle_simple_met T : psum (fun t => nrm 3 (proj id_blk (order 3 t) (W (x t))) ^ 2) T
  <= idle_simple_bound (quad 3 witness start) 0 (1 / 6).
Proof.
  apply (claim_idle_simple 3 id_blk (order 3) _ W _ 1 _ (1 / 6) (1 / 2) 0 x m T W_smooth); try lra.
  - apply irun_idle.
  - reflexivity.
  - apply W_below.
  - pose proof frobenius_le. lra.
Qed.

Example claim_idle_cycles_met K : psum (fun k => nrm 3 (W (x (k * 3)%nat)) ^ 2) K
  <= idle_cycle_bound (quad 3 witness start) 0 1 (frobenius 3 witness) (1 / 6) (1 / 2) 3.
Proof.
  apply (claim_idle_cycles 3 3 id_blk (order 3) _ W _ 1 _ (1 / 6) (1 / 2) 0 x m K W_smooth); try lra.
  - apply irun_idle.
  - reflexivity.
  - apply W_below.
  - apply bracket_met.
  - apply (order_once 3).
Qed.

Example claim_coherence_met T : psum (fun t => nrm 3 (m t) ^ 2) T
  <= coherence_squared (1 / 2) 3 * psum (fun t => nrm 3 (proj id_blk (order 3 t) (W (x t))) ^ 2) T.
Proof.
  apply (claim_coherence 3 3 id_blk (order 3) W (1 / 6) (1 / 2) x m); auto; try lra. apply irun_idle.
Qed.

Lemma cyclic_bracket_met : 0 < cyclic_bracket 1 (frobenius 3 witness) (1 / 6) (1 / 2) 3.
Proof.
  unfold cyclic_bracket. pose proof frobenius_le. assert (sqrt (coherence_squared (1 / 2) 3) <= 1).
  { apply Rle_trans with (sqrt 1); [apply sqrt_le_1_alt|rewrite sqrt_1; lra].
    replace (coherence_squared (1 / 2) 3) with (3 / 7) by (unfold coherence_squared; field). lra. }
  pose proof (sqrt_pos (coherence_squared (1 / 2) 3)). pose proof (sqrt_pos (psum (fun i => psum (fun j => witness i j ^ 2) 3) 3)) as F.
  fold (frobenius 3 witness) in F. nra.
Qed.

Example claim_idle_sum_cyclic_met T : psum (fun t => nrm 3 (proj id_blk (order 3 t) (W (x t))) ^ 2) T
  <= cyclic_idle_bound (quad 3 witness start) 0 1 (frobenius 3 witness) (1 / 6) (1 / 2) 3.
Proof.
  apply (claim_idle_sum_cyclic 3 3 id_blk (order 3) _ W _ 1 _ (1 / 6) (1 / 2) 0 x m T W_smooth); auto; try lra.
  - apply irun_idle.
  - apply W_below.
  - apply cyclic_bracket_met.
Qed.

Example claim_idle_cycles_cyclic_met K : psum (fun k => nrm 3 (W (x (k * 3)%nat)) ^ 2) K
  <= cyclic_idle_cycle_bound (quad 3 witness start) 0 1 (frobenius 3 witness) (1 / 6) (1 / 2) 3.
Proof.
  apply (claim_idle_cycles_cyclic 3 3 id_blk (order 3) _ W _ 1 _ (1 / 6) (1 / 2) 0 x m K W_smooth); auto; try lra.
  - apply irun_idle.
  - apply W_below.
  - apply cyclic_bracket_met.
Qed.

(* the step size and momentum at which idle momentum diverges, frozen: *)
Definition xf := fun t => fst (frun (27 / 14) (3 / 10) t).
Definition mf := fun t => snd (frun (27 / 14) (3 / 10) t).

Example claim_frozen_energy_met t :
  quad 3 witness (xf (S t)) + frozen_energy_weight (27 / 14) (3 / 10) * nrm 3 (mf (S t)) ^ 2
    <= quad 3 witness (xf t) + frozen_energy_weight (27 / 14) (3 / 10) * nrm 3 (mf t) ^ 2
       - descent_coeff (27 / 14) (witness (order 3 t) (order 3 t)) * nrm 3 (proj id_blk (order 3 t) (mf (S t))) ^ 2.
Proof.
  apply (claim_frozen_energy 3 id_blk (order 3) _ W (fun i => witness i i)); try apply W_smooth; try lra.
  apply frun_frozen.
Qed.

Example claim_frozen_sum_met T : psum (fun t => nrm 3 (proj id_blk (order 3 t) (W (xf t))) ^ 2) T
  <= frozen_bound (quad 3 witness start) 0 1 (27 / 14) (3 / 10).
Proof.
  apply (claim_frozen_sum 3 id_blk (order 3) _ W _ 1 _ (27 / 14) (3 / 10) 0 xf mf T W_smooth); try lra.
  - apply frun_frozen.
  - apply zero_nrm.
  - apply W_below.
Qed.

Example claim_frozen_cycles_met K : psum (fun k => nrm 3 (W (xf (k * 3)%nat)) ^ 2) K
  <= frozen_cycle_bound (quad 3 witness start) 0 1 (frobenius 3 witness) (27 / 14) (3 / 10) 2.
Proof.
  apply (claim_frozen_cycles 3 2 id_blk (order 3) _ W _ 1 _ (27 / 14) (3 / 10) 0 xf mf K W_smooth); try lra.
  - apply frun_frozen.
  - apply zero_nrm.
  - apply W_below.
  - apply (order_once 3).
Qed.

(* and with moving idle blocks: *)
Example claim_idle_limit_met : forall B, exists t, B < nrm 3 (fst (irun (27 / 14) (3 / 10) t)).
Proof.
  apply (claim_idle_limit (order 3) _ (fun t => snd (irun (27 / 14) (3 / 10) t))).
  - intros k i. apply order_cyclic.
  - apply irun_idle.
  - reflexivity.
  - reflexivity.
Qed.
